"""Arguments of every process: the engine's flags word for word as the deployment guide has them, and who adds what.

Field rules stand on the field, rules between fields in argument_rules. Nothing here looks at files or devices, except
`load_model_config` and what takes its result; what a machine must have is asked by `argument_rules.check_runnable`.
"""

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from services.contracts import argument_rules as rules
from services.contracts.draft import Draft, DraftConfig, parse_draft_config, parse_nextn_config, trained_width
from services.contracts.flags import Address, Addresses, FlagSet, Integers, refusal
from services.contracts.geometry import Geometry, blocks_for, rows_ahead
from services.contracts.model import ModelConfig, parse_model_config
from services.contracts.topology import Topology, even_partition

Dtype = Literal["auto", "bfloat16", "float32"]
Seconds = Annotated[float, Field(gt=0)]

UTILIZATION = 0.93  # of a GPU that one rank's processes may take, the agent beside it too
UNSET = 0  # derived at the end of parsing; as a given value it is refused
CACHE_BYTES = 1 << 30  # of one rank, where --num-blocks leaves the size to us
HOST_FRAME_BYTES, HOST_FRAMES = 32 << 20, 4  # few messages to steer it
CUDA_FRAME_BYTES, CUDA_FRAMES = 320 << 20, 6  # 8,192 tokens of K3 in one: a message over NVLink costs as much as 30 MiB
LADDER = (1, 2, 4, *range(8, 161, 8))  # default capture sizes, cut by the batch


class EngineArguments(FlagSet):
    """One engine: its model, shape and limits. All its processes get the same values."""

    aliases: ClassVar[dict[str, str]] = {
        "tensor-parallel-size": "attn_tp_size",
        "tp": "attn_tp_size",
        "ep-size": "expert_parallel_size",
    }

    model: str = Field(description="directory of the checkpoint (config.json and safetensors)")
    served_model_name: str = Field(default="", description="name that clients ask for; the directory's name if unset")
    tokenizer: str = Field(default="", description="directory of tokenizer.json and chat template; the model's if unset")
    dtype: Dtype = Field(default="auto", description="weights and activations; auto is bfloat16")
    kv_cache_dtype: Dtype = Field(default="auto", description="MLA rows and convolution history; auto is --dtype")
    load_format: Literal["auto", "safetensors"] = Field(default="auto", description="how the checkpoint is read")

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: NVIDIA GPUs where there are any")
    base_gpu_id: int = Field(default=0, ge=0, description="GPU of this node's first worker, of those that are visible")
    gpu_memory_utilization: float = Field(default=UTILIZATION, gt=0, le=1, description="share of a GPU that a rank may take")
    attention_backend: Literal["auto", "reference", "flashmla", "tokenspeed_mla"] = Field(
        default="auto", description="MLA kernels"
    )
    drafter_attention_backend: Literal["auto", "reference", "flashmla", "tokenspeed_mla"] = Field(
        default="auto", description="the drafter's MLA kernels; as --attention-backend if unset"
    )
    kda_backend: Literal["auto", "reference", "flashkda"] = Field(default="auto", description="KDA prefill scan")
    moe_backend: Literal["auto", "reference", "marlin", "wgmma"] = Field(default="auto", description="routed experts' kernels")
    all2all_backend: Literal["auto", "gloo", "deepep"] = Field(default="auto", description="how rows reach their experts")

    world_size: int = Field(default=UNSET, ge=1, description="ranks of the engine, over all nodes")
    nnodes: int = Field(default=1, ge=1, description="nodes of the engine")
    node_rank: int = Field(default=0, ge=0, description="this node, from 0")
    nprocs_per_node: int = Field(default=UNSET, ge=1, description="workers on each node")
    dist_init_addr: Address = Field(default="127.0.0.1:29500", description="HOST:PORT on node 0 where the ranks meet")
    attn_tp_size: int = Field(default=UNSET, ge=1, description="attention tensor-parallel size")
    dense_tp_size: int = Field(default=UNSET, ge=1, description="tensor-parallel size of dense MLPs")
    moe_tp_size: int = Field(default=UNSET, ge=1, description="tensor-parallel size inside one routed expert")
    pipeline_parallel_size: int = Field(default=1, ge=1, description="stages (prefill only)")
    pp_layer_partition: Integers = Field(default=(), description="target layers of each stage, for example 24,24,24,21")
    data_parallel_size: int = Field(default=UNSET, ge=1, description="replicas (decode only)")
    expert_parallel_size: int = Field(default=UNSET, ge=1, description="ranks that share one stage's routed experts")

    deepep_mode: Literal["normal", "low_latency", "auto"] = Field(default="auto", description="dispatch of expert rows")
    low_latency_max_num_tokens_per_gpu: int = Field(
        default=256, ge=1, description="most rows that one rank may dispatch in low latency"
    )
    max_num_seqs: int = Field(default=UNSET, ge=1, description="most requests at once, over all replicas")
    max_cudagraph_capture_size: int = Field(default=UNSET, ge=1, description="largest decode batch of the capture ladder")
    cudagraph_capture_sizes: Integers = Field(
        default=(), description="decode batches of one replica to capture, instead of the ladder up to that size"
    )
    enforce_eager: bool = Field(default=False, description="never capture graphs (a diagnostic on decode)")
    graph_debug: bool = Field(default=False, description="compare each replayed graph with an eager round; check addresses")
    chunked_prefill_size: int = Field(
        default=8192, ge=128, description="prompt tokens of one batch; rounded down to a multiple of 128"
    )
    max_model_len: int = Field(default=8192, ge=2, description="prompt and answer together, tokens")
    num_blocks: int = Field(default=UNSET, ge=2, description="each rank's cache blocks of 128 tokens, block 0 included")
    num_slots: int = Field(default=UNSET, ge=2, description="each rank's KDA slots, slot 0 included")
    enable_prefix_caching: bool = Field(default=True, description="keep cache blocks for prompts that begin alike")
    disable_kvstore: bool = Field(default=False, description="no offload store of cache blocks (there is none here)")
    mm_encoder_tp_mode: Literal["weights", "data"] = Field(default="weights", description="vision encoder placement (prefill)")

    disaggregation_mode: Literal["prefill", "decode"] = Field(description="what this engine does: prefill or decode")
    disaggregation_layerwise_interval: int = Field(
        default=1, ge=0, description="layers for each transfer; 0 sends a chunk when all its layers are done"
    )
    retraction_snapshot_ratio: float | None = Field(
        default=None, ge=0, description="host memory for suspended requests as a share of the cache; 0: none (decode)"
    )
    speculative_algorithm: Literal["DSPARK", "MTP"] | None = Field(default=None, description="drafter")
    speculative_draft_model_path: str | None = Field(default=None, description="directory of the drafter's checkpoint")
    speculative_num_draft_tokens: int | None = Field(
        default=None, ge=2, description="verify width, the anchor included; a DSpark drafter's own if unset"
    )
    speculative_adaptive: bool = Field(
        default=True, description="narrower rounds, and no speculation, where it costs more than it brings (decode)"
    )

    engine_id: str = Field(default="", description="name in Redis and in errors; prefill-0 or decode-0 if unset")
    redis_url: str = Field(default="redis://127.0.0.1:6379/0", description="Redis, redis://HOST:PORT/N or unix://PATH")
    startup_timeout: Seconds = Field(default=120.0, description="seconds until every rank must be ready")
    request_timeout: Seconds = Field(default=600.0, description="seconds that a request may take if it names no deadline")

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        self.fill(rules.derive(self))
        rules.check(self)
        return self

    @property
    def compute_dtype(self) -> str:
        """bfloat16 or float32."""
        return "bfloat16" if self.dtype == "auto" else self.dtype

    @property
    def cache_dtype(self) -> str:
        """bfloat16 or float32, of MLA rows and convolution history; recurrent state is always float32."""
        return self.compute_dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def verify_width(self) -> int:
        """Rows of one request in a decode round: the anchor and the proposals; 1 without speculation. Where the flag is unset
        it is what the DSpark drafter was trained for; ConfigError if its config.json cannot be read."""
        if self.speculative_algorithm is None:
            return 1
        return self.speculative_num_draft_tokens or trained_width(
            *_read_config("speculative_draft_model_path", self.draft_path)
        )

    @property
    def replica_seqs(self) -> int:
        """Sequence places of one replica."""
        return self.max_num_seqs // self.data_parallel_size

    @property
    def captures_graphs(self) -> bool:
        """Whether decode rounds are to be captured, where they run on a GPU."""
        return self.disaggregation_mode == "decode" and not self.enforce_eager

    def buckets(self) -> tuple[int, ...]:
        """The capture ladder: batch sizes of one replica that a decode round pads to, ascending (spec scheduling §3.3)."""
        if self.cudagraph_capture_sizes:
            largest = min(max(self.cudagraph_capture_sizes), self.replica_seqs)
            return tuple(sorted({*(size for size in self.cudagraph_capture_sizes if size < largest), largest}))
        limit = min(self.max_cudagraph_capture_size, self.replica_seqs)
        sizes = {size for size in LADDER if size <= limit}
        return tuple(sorted(sizes | {max(1, limit - 1), limit} if limit < LADDER[-1] else sizes))

    def load_model_config(self) -> ModelConfig:
        """Read --model's config.json. ConfigError if it is absent or no K3 configuration."""
        return parse_model_config(*_read_config("model", self.model))

    @property
    def draft_path(self) -> str:
        """Where the drafter's checkpoint is; a NextN layer is in the target's own unless another is named."""
        return self.speculative_draft_model_path or self.model

    def load_draft_config(self, model: ModelConfig) -> Draft | None:
        """Read the drafter's config.json, None without speculation. ConfigError if it does not fit the target or the width."""
        if self.speculative_algorithm is None:
            return None
        parse = parse_draft_config if self.speculative_algorithm == "DSPARK" else parse_nextn_config
        config, source = _read_config("speculative_draft_model_path", self.draft_path)
        draft = parse(config, source, model)
        draft.check_width(self.verify_width, source)
        if isinstance(draft, DraftConfig) and self.max_model_len > draft.max_position_embeddings:
            rule = f"the drafter's positions end at {draft.max_position_embeddings}"
            raise refusal("max_model_len", self.max_model_len, rule, "lower it")
        return draft

    def topology(self, model: ModelConfig) -> Topology:
        """The engine's shape. ConfigError where the model cannot be cut that way."""
        rules.check_model(self, model)
        return Topology(
            role=self.disaggregation_mode,
            stages=self.pipeline_parallel_size,
            dp_size=self.data_parallel_size,
            tp_size=self.attn_tp_size,
            ep_size=self.expert_parallel_size,
            num_layers=model.num_hidden_layers,
            partition=self.pp_layer_partition or even_partition(model.num_hidden_layers, self.pipeline_parallel_size),
        )

    def geometry(self, model: ModelConfig) -> Geometry:
        """One rank's cache fields, the drafter's too."""
        draft = self.load_draft_config(model)
        if draft is None:
            return Geometry(model, self.topology(model), self.cache_dtype)
        return Geometry(model, self.topology(model), self.cache_dtype, draft.cache_layers, draft.mla_row)

    def cache_slots(self, geometry: Geometry) -> int:
        """KDA slots of one rank, the null slot included. Derived: one for each request of a replica, for prefill's prefix cache
        as many again while those take no more than a quarter of CACHE_BYTES."""
        caching = self.enable_prefix_caching and self.disaggregation_mode == "prefill"
        checkpoints = min(self.replica_seqs, CACHE_BYTES // 4 // max(1, geometry.slot_bytes)) if caching else 0
        return self.num_slots or self.replica_seqs + checkpoints + 1

    @property
    def request_blocks(self) -> int:
        """Blocks of one request of full length, with what a round may write behind it."""
        return blocks_for(self.max_model_len + rows_ahead(self.verify_width))

    def cache_size(self, geometry: Geometry) -> tuple[int, int]:
        """(blocks, slots) of one rank, null block and slot included.

        Derived: the slots above, and blocks for as many full-length requests as a replica has places, bounded by CACHE_BYTES.
        """
        slots = self.cache_slots(geometry)
        if self.num_blocks:
            return self.num_blocks, slots
        one = self.request_blocks
        affordable = (CACHE_BYTES - slots * geometry.slot_bytes) // max(1, geometry.block_bytes)
        if affordable < one + 1:
            raise refusal(
                "max_model_len", self.max_model_len,
                f"one such request needs {one} blocks of {geometry.block_bytes} bytes beside {slots} slots of "
                f"{geometry.slot_bytes} bytes, more than the {CACHE_BYTES} bytes that a rank takes by itself",
                "lower it or --max-num-seqs, or set --num-blocks",
            )  # fmt: skip
        return min(affordable, self.replica_seqs * one + 1), slots

    def image_blocks(self, geometry: Geometry, num_blocks: int, num_slots: int) -> int:
        """Blocks of host memory of one decode rank for the images of suspended requests; 0: nobody is suspended.

        --retraction-snapshot-ratio is their share of the rank's cache. Without it there is memory for as many images of the
        size that requests have when they share the cache evenly as a replica has places (spec scheduling §3.5).
        """
        if self.disaggregation_mode == "prefill" or self.retraction_snapshot_ratio == 0:
            return 0
        block, slot = max(1, geometry.block_bytes), geometry.slot_bytes
        cache = num_blocks * block + num_slots * slot
        if self.retraction_snapshot_ratio is None:
            image = -(-(num_blocks - 1) // self.replica_seqs) * block + slot
            return max(1, min(self.replica_seqs * image, cache) // block)
        blocks = int(self.retraction_snapshot_ratio * cache) // block
        if blocks < 1:
            raise refusal(
                "retraction_snapshot_ratio", self.retraction_snapshot_ratio,
                f"that share of a rank's cache of {cache} bytes is less than one block of {block}",
                f"give at least {block / cache:.2g}, 0 for no images, or leave it out",
            )  # fmt: skip
        return blocks


def _read_config(field: str, folder: str) -> tuple[dict[str, Any], str]:
    """config.json of the checkpoint that a flag names, and its path."""
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text()), str(path)
    except OSError as error:
        rule = f"config.json cannot be read ({error.strerror})"
        raise refusal(field, folder, rule, "give a checkpoint directory") from None
    except ValueError as error:
        raise refusal(field, folder, f"config.json is not JSON ({error})", "give a checkpoint directory") from None


class WorkerArguments(EngineArguments):
    """services.worker.main: one rank's compute process."""

    rank: int = Field(ge=0, description="global rank")
    listen: Address = Field(description="HOST:PORT of WorkerControl")
    agent_socket: str = Field(description="Unix socket of this rank's kvtransfer agent")
    run_dir: str = Field(description="directory for the engine's Unix sockets on this node")
    cpu_threads: int = Field(default=1, ge=1, description="threads of one CPU operation; many ranks share a machine")

    @model_validator(mode="after")
    def _rank(self) -> Self:
        rules.check_rank(self, self.rank)
        return self


class AgentArguments(EngineArguments):
    """services.kvtransfer.main: the transfer agent beside one worker."""

    rank: int = Field(ge=0, description="global rank of the worker")
    listen: Address = Field(description="HOST:PORT of TransferControl")
    peer_listen: Address | None = Field(
        default=None, description="HOST:PORT where decode agents link to (prefill only); --listen's host, and any free port"
    )
    agent_socket: str = Field(description="Unix socket that the worker connects to")
    transfer_frame_bytes: int = Field(
        default=0, ge=0, description="bytes of one staging frame, the same on P and D; 0: 32 MiB, on a GPU 320 MiB"
    )
    transfer_frames: int = Field(
        default=0, ge=0, description="staging frames, which bound the agent's memory; 0: 4, on a GPU 6"
    )

    @model_validator(mode="after")
    def _rank(self) -> Self:
        rules.check_rank(self, self.rank)
        return self


class SchedulerArguments(EngineArguments):
    """services.scheduler.{prefill,decode}.main."""

    listen: Address = Field(description="HOST:PORT of the scheduler's services")
    workers: Addresses = Field(description="HOST:PORT of each leader, in leader order")
    agents: Addresses = Field(description="HOST:PORT of each agent, in global-rank order")
    decode_address: Address | None = Field(default=None, description="HOST:PORT of the decode scheduler (prefill only)")

    @model_validator(mode="after")
    def _peers(self) -> Self:
        leaders = self.world_size // self.attn_tp_size
        for field, found, needed in (("workers", self.workers, leaders), ("agents", self.agents, self.world_size)):
            if len(found) != needed:
                raise refusal(field, found, f"has {len(found)} addresses where the topology has {needed}", "name each once")
        if (self.decode_address is None) == (self.disaggregation_mode == "prefill"):
            raise refusal(
                "decode_address", self.decode_address, "goes with --disaggregation-mode prefill and only with it",
                "give the decode scheduler's HOST:PORT there",
            )  # fmt: skip
        return self


class GatewayArguments(FlagSet):
    """services.gateway.main: HTTP in, tokens out."""

    model: str = Field(description="directory of the checkpoint (for its tokenizer and name)")
    prefill_address: Address = Field(description="HOST:PORT of the prefill scheduler")
    host: str = Field(default="127.0.0.1", description="address that HTTP binds")
    port: int = Field(default=8000, ge=0, le=65535, description="HTTP port")
    served_model_name: str = Field(default="", description="name that clients ask for; the directory's name if unset")
    tokenizer: str = Field(default="", description="directory of tokenizer.json and chat template; the model's if unset")
    redis_url: str = Field(default="redis://127.0.0.1:6379/0", description="Redis, redis://HOST:PORT/N or unix://PATH")
    api_key: str | None = Field(default=None, description="bearer token of clients; best as K3MESH_API_KEY")
    max_body_bytes: int = Field(default=16 << 20, ge=1, description="largest HTTP body")
    max_queued_requests: int = Field(default=512, ge=1, description="requests in the mesh; more get 429")
    max_buffered_bytes: int = Field(default=4 << 20, ge=1, description="unread output at which a slow client is cut off")
    request_timeout: Seconds = Field(default=600.0, description="seconds that a request may take")
    shutdown_timeout: Seconds = Field(default=30.0, description="seconds that open streams get to end after SIGTERM")

    @model_validator(mode="after")
    def _names(self) -> Self:
        self.fill(rules.derive_names(self.model, self.served_model_name, self.tokenizer))
        return self
