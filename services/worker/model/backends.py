"""From the backend flags to the ops that a rank runs."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from k3mesh.errors import ConfigError
from kernels.ops import OpGeometry, Ops
from kernels.registry import CANDIDATES, REFERENCE, BackendUnusable, Choice, bundle, resolve
from services.contracts.draft import Draft, DraftConfig
from services.contracts.model import ModelConfig
from services.contracts.topology import Topology

# Which ops a flag speaks for. --kda-backend selects the prompt's scan alone, as the flag's public meaning is.
FLAG_OF = {
    "mla_extend": "attention_backend",
    "mla_decode": "attention_backend",
    "kda_extend": "kda_backend",
    "prepare_experts": "moe_backend",
}
# Ops whose reference implementation asks the host for a length: a round with one of them cannot be captured.
HOST_BOUND = ("mla_decode", "mla_block", "kda_decode", "kda_verify", "kda_commit", "prepare_experts")
DRAFT_OPS = ("mla_extend", "mla_decode", "mla_block")  # a drafter's own; it shares the others with the target


def choose_ops(
    model: ModelConfig,
    topology: Topology,
    device: torch.device | str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    *,
    attention_backend: str = "auto",
    kda_backend: str = "auto",
    moe_backend: str = "auto",
) -> tuple[Ops, tuple[Choice, ...]]:
    """The rank's ops and the table of choices, for the log. ConfigError names the flag whose backend is unusable here."""
    wanted = {"attention_backend": attention_backend, "kda_backend": kda_backend, "moe_backend": moe_backend}
    geometry = op_geometry(model, topology, dtype, cache_dtype)
    choices: list[Choice] = []
    for op in CANDIDATES:
        flag = FLAG_OF.get(op)
        try:
            choices.append(resolve(op, torch.device(device), geometry, wanted[flag] if flag else "auto"))
        except BackendUnusable as error:
            if flag is None:
                raise ConfigError(str(error)) from error
            raise ConfigError(f"--{flag.replace('_', '-')} {wanted[flag]}: {error}", param=flag) from error
    return bundle(choices), tuple(choices)


def choose_draft_ops(
    ops: Ops, geometry: OpGeometry, draft: Draft, topology: Topology, device: torch.device | str, backend: str
) -> tuple[Ops, tuple[Choice, ...]]:
    """The target's ops with attention for the drafter's heads, by --drafter-attention-backend. ConfigError as above."""
    if isinstance(draft, DraftConfig):
        geometry = replace(
            geometry,
            mla_heads=draft.num_attention_heads // topology.tp_size,
            mla_latent=draft.kv_lora_rank,
            mla_shared=draft.qk_rope_head_dim,
        )
    try:
        choices = tuple(resolve(op, torch.device(device), geometry, backend) for op in DRAFT_OPS)
    except BackendUnusable as error:
        flag = "drafter_attention_backend"
        raise ConfigError(f"--{flag.replace('_', '-')} {backend}: {error}", param=flag) from error
    return replace(ops, **{choice.op: choice.implementation for choice in choices}), choices


def host_bound(choices: Iterable[Choice]) -> list[str]:
    """Those of the chosen ops that keep a decode round from being captured."""
    return [it.op for it in choices if it.backend == REFERENCE and it.op in HOST_BOUND]


def op_geometry(model: ModelConfig, topology: Topology, dtype: torch.dtype, cache_dtype: torch.dtype) -> OpGeometry:
    """The shapes that one rank's ops see."""
    return OpGeometry(
        dtype=dtype,
        cache_dtype=cache_dtype,
        hidden=model.hidden_size,
        mla_heads=model.num_attention_heads // topology.tp_size,
        mla_latent=model.kv_lora_rank,
        mla_shared=model.qk_rope_head_dim,
        kda_heads=model.kda_num_heads // topology.tp_size,
        kda_head_dim=model.kda_head_dim,
        conv_width=model.conv_kernel_size,
        num_experts=model.num_experts,
        local_experts=model.num_experts // topology.ep_size,
        top_k=model.num_experts_per_token,
        moe_latent=model.routed_expert_hidden_size,
        moe_inner=model.moe_intermediate_size,
    )
