"""Each layer alone against the formulas of the specification, from the released tensors."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.contracts.geometry import Geometry
from services.worker.model.attn_res import Residual
from services.worker.model.backends import choose_ops
from services.worker.model.kda import KdaAttention
from services.worker.model.loader import SINGLE, load_stage_weights
from services.worker.model.mla import MlaAttention
from services.worker.model.mlp import DenseFfn
from services.worker.model.moe import MoeFfn
from tests.lib import definitions
from tests.lib.golden import (
    GOLDEN,
    TINY,
    ThreadDispatcher,
    ThreadGroup,
    ThreadTensorParallel,
    golden_model,
    make_batch,
    make_caches,
    needs_golden,
    relative_error,
    request,
    topology_of,
)

pytestmark = needs_golden

EXACT = 1e-5


@cache
def released(layer: int) -> dict[str, Tensor]:
    """Tensors of one layer, names without the layer's prefix."""
    prefix = f"language_model.model.layers.{layer}."
    tensors = load_file(GOLDEN / TINY / SINGLE)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def loaded() -> dict[str, Tensor]:
    topology = topology_of(golden_model(TINY))
    return load_stage_weights(GOLDEN / TINY, golden_model(TINY), topology, topology.place_of(0), torch.float32)


def surroundings():
    model = golden_model(TINY)
    topology = topology_of(model)
    ops, _ = choose_ops(model, topology, "cpu", torch.float32, torch.float32)
    return model, ops, ThreadTensorParallel(0, 1, ThreadGroup(1)), make_caches(Geometry(model, topology, "float32"), 0, 4, 4)


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layer", [3, 12])
def test_absorbed_mla_equals_expanded_mla(layer: int):
    model, ops, tp, caches = surroundings()
    attention = MlaAttention(model, loaded(), f"model.layers.{layer}.self_attn", caches.mla[layer], tp, ops)
    x, sequence = rows(150), request([0] * 150)
    out = attention(x, make_batch([(sequence, 150)], "extend"))

    w = {name: tensor.double() for name, tensor in released(layer).items() if name.startswith("self_attn.")}
    x = x.double()

    def linear(name: str, value: Tensor) -> Tensor:
        return value @ w[f"self_attn.{name}.weight"].T

    q = linear("q_b_proj", definitions.rms(linear("q_a_proj", x), w["self_attn.q_a_layernorm.weight"], 1e-5))
    latent, shared = linear("kv_a_proj_with_mqa", x).split([32, 16], -1)
    latent = definitions.rms(latent, w["self_attn.kv_a_layernorm.weight"], 1e-5)
    kv = linear("kv_b_proj", latent).view(150, 4, 64)
    q, k = q.view(150, 4, 48), torch.cat([kv[..., :32], shared[:, None].expand(-1, 4, -1)], -1)
    scores = torch.einsum("thd,shd->hts", q, k) * 48**-0.5
    scores = scores.masked_fill(torch.ones(150, 150).triu(1).bool(), float("-inf"))
    o = torch.einsum("hts,shd->thd", scores.softmax(-1), kv[..., 32:]).flatten(1)
    assert relative_error(out, linear("o_proj", o * torch.sigmoid(linear("g_proj", x)))) < EXACT

    cached = torch.cat([caches.mla[layer][block, :, 0] for block in sequence.blocks])[:150]
    assert relative_error(cached, torch.cat([latent, shared], -1)) < EXACT


@pytest.mark.parametrize("layer", [0, 5])
def test_kda_equals_the_recurrence(layer: int):
    model, ops, tp, caches = surroundings()
    recurrent, conv = caches.kda_rec[layer], caches.kda_conv[layer]
    attention = KdaAttention(model, loaded(), f"model.layers.{layer}.self_attn", recurrent, conv, tp, ops)
    x, sequence = rows(40), request([0] * 40, slot=2)
    out = attention(x, make_batch([(sequence, 40)], "extend"))

    w = {name.removeprefix("self_attn."): tensor.double() for name, tensor in released(layer).items()}
    x = x.double()
    inputs = [x @ w[f"{name}_proj.weight"].T for name in "qkv"]
    q, k, v = (
        definitions.conv(u, w[f"{name}_conv1d.weight"][:, 0], [torch.zeros(128, 3)], [40])[0].view(40, 4, 32)
        for name, u in zip("qkv", inputs, strict=True)
    )
    decay = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T).view(40, 4, 32)
    beta, gate = x @ w["b_proj.weight"].T, (x @ w["g_proj.weight"].T).view(40, 4, 32)
    dt_bias = w["dt_bias"].view(4, 32)
    o, (state,) = definitions.kda(q, k, v, decay, beta, w["A_log"][:4], dt_bias, -5.0, [torch.zeros(4, 32, 32)], [40])
    wanted = definitions.gated_norm(o, gate, w["o_norm.weight"], 1e-5) @ w["o_proj.weight"].T
    assert relative_error(out, wanted) < EXACT
    assert relative_error(recurrent[2], state) < EXACT  # key rows, value columns
    assert relative_error(conv[2], torch.cat(inputs, -1)[-3:].T) < EXACT  # q | k | v, oldest first


@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_latent_moe_equals_the_dense_sum_over_its_experts(mode):
    model, ops, tp, _ = surroundings()
    dispatcher = ThreadDispatcher(0, ThreadGroup(1), [])
    ffn = MoeFfn(model, loaded(), "model.layers.6.block_sparse_moe", tp, dispatcher, ops)
    x, write_slots = rows(10), torch.arange(128, 138)
    write_slots[4] = write_slots[9] = 0  # padding
    out = ffn(x, write_slots, mode)

    w = {name.removeprefix("block_sparse_moe."): tensor for name, tensor in released(6).items()}

    def matrix(name: str) -> Tensor:
        if f"{name}.weight" in w:
            return w[f"{name}.weight"].double()
        return definitions.dequantize(w[f"{name}.weight_packed"], w[f"{name}.weight_scale"])

    ids, weights = definitions.route(x, matrix("gate"), w["gate.e_score_correction_bias"], 4, True, 1.0)
    z = x.double() @ matrix("routed_expert_down_proj").T
    routed = torch.zeros_like(z)
    for row in range(10):
        for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
            w1, w3, w2 = (matrix(f"experts.{expert}.{name}") for name in ("w1", "w3", "w2"))
            routed[row] += weight * definitions.expert(z[row : row + 1], w1, w3, w2, 4.0, 25.0)[0]
    up = definitions.rms(routed, matrix("routed_expert_norm"), 1e-5) @ matrix("routed_expert_up_proj").T
    gate, value = (x.double() @ matrix(f"shared_experts.{name}_proj").T for name in ("gate", "up"))
    wanted = up + definitions.situ(gate, value, 4.0, 25.0) @ matrix("shared_experts.down_proj").T
    live = write_slots >= 128
    assert relative_error(out[live], wanted[live]) < EXACT
    assert out.isfinite().all()
    ((sent, sent_weights),) = dispatcher.calls
    assert torch.equal(sent[live], ids[live])
    assert (sent[~live] == -1).all() and (sent_weights[~live] == 0).all()


@pytest.mark.parametrize(("mode", "other"), [("extend", "decode"), ("decode", "extend")])
def test_the_mode_says_which_form_of_an_op_runs(mode, other: str):
    model, ops, tp, caches = surroundings()

    def refuse(*args: object) -> Tensor:
        raise AssertionError(f"the {other} form ran in {mode} mode")

    ops = replace(ops, **{f"mla_{other}": refuse, f"kda_{other}": refuse})
    batch, x = make_batch([(request([0] * 3), 3)], mode), rows(3)
    weights = loaded()
    mla = MlaAttention(model, weights, "model.layers.3.self_attn", caches.mla[3], tp, ops)
    kda = KdaAttention(model, weights, "model.layers.0.self_attn", caches.kda_rec[0], caches.kda_conv[0], tp, ops)
    assert mla(x, batch).shape == kda(x, batch).shape == x.shape


def test_dense_ffn_equals_its_formula():
    model, ops, tp, _ = surroundings()
    ffn, x = DenseFfn(model, loaded(), "model.layers.0.mlp", tp, ops), rows(6)
    out = ffn(x, torch.arange(128, 134), "extend")
    gate, up, down = (released(0)[f"mlp.{name}_proj.weight"].double() for name in ("gate", "up", "down"))
    wanted = definitions.situ(x.double() @ gate.T, x.double() @ up.T, 4.0, 25.0) @ down.T
    assert relative_error(out, wanted) < EXACT


def test_a_closing_layer_mixes_first_and_restarts_from_its_attention_alone():
    _, ops, _, _ = surroundings()
    first, a, y = rows(3, 1), rows(3, 2), rows(3, 3)
    residual = Residual(first, None, 2, ops.attn_res_mix, 1e-5)
    weight = torch.randn(128, generator=torch.Generator().manual_seed(4))
    assert torch.equal(residual.mix(weight), first)
    residual.close(a)
    residual.add(y)
    assert torch.equal(residual.blocks, first[None]) and torch.equal(residual.prefix, a + y)
    resumed = Residual(residual.hop().prefix, residual.hop().blocks, 3, ops.attn_res_mix, 1e-5)
    resumed.close(y)
    assert torch.equal(resumed.blocks, torch.stack([first, a + y])) and torch.equal(resumed.prefix, y)


def test_what_a_hop_carries_does_not_change_while_the_next_stage_works():
    _, ops, _, _ = surroundings()
    residual = Residual(rows(3, 1), None, 1, ops.attn_res_mix, 1e-5)
    residual.close(rows(3, 2))
    hop = residual.hop()
    prefix, blocks = hop.prefix.clone(), hop.blocks.clone()
    later = Residual(hop.prefix, hop.blocks, 2, ops.attn_res_mix, 1e-5)
    later.close(rows(3, 3))
    later.add(rows(3, 4))
    assert torch.equal(hop.prefix, prefix) and torch.equal(hop.blocks, blocks)


def test_a_layer_takes_its_weights_and_leaves_the_others():
    model, ops, tp, caches = surroundings()
    weights = loaded()
    MlaAttention(model, weights, "model.layers.3.self_attn", caches.mla[3], tp, ops)
    assert not [name for name in weights if name.startswith("model.layers.3.self_attn")]
    assert "model.layers.7.self_attn.kv_b_proj.weight" in weights
