"""The cost of a prefill step and of a decode round of K3 on GPUs, layer by layer from bytes, arithmetic and measured kernels
(decision 17). Weights of a rank are those of contracts.sharding; what a constant means is said in the constants' file."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from services.contracts import sharding
from services.contracts.arguments import EngineArguments
from services.contracts.draft import DraftConfig, taps_in
from services.contracts.draft_sharding import DraftPart, dspark_targets
from services.contracts.model import ModelConfig
from services.contracts.topology import Topology
from services.simulate.constants import Constants, interpolate
from services.simulate.costs import Chunk, Control, Round

ITEM = 2  # bytes of a bfloat16
SCAN_HEADS = 12  # of the measured scan
GPUS_OF_A_NODE = 8


@dataclass(frozen=True, slots=True)
class Layers:
    """What one stage's layers add up to, for one rank. Parameters are elements."""

    kda: int
    mla: int
    moe: int
    attention: int  # parameters of both kinds
    dense: int
    shared: int  # shared experts and the up-projection
    sliced: int  # router and down-projection: they see the rank's slice of the rows
    mixed: int  # vectors that all attention residuals read and write, for each token

    @property
    def count(self) -> int:
        return self.kda + self.mla


class KernelCosts:
    """services.simulate.costs.Costs of K3's kernels."""

    def __init__(self, constants: Constants, prefill: EngineArguments, decode: EngineArguments):
        self.control = Control.of(constants)
        self.contention = None
        self.nic = constants.number("nic_bytes_per_s")
        self.host_copy = constants.number("host_copy_bytes_per_s")
        self.acceptance = constants.numbers("acceptance")
        self._constants = constants
        self._model = model = prefill.load_model_config()
        self._p, self._d = prefill.topology(model), decode.topology(model)
        self._draft = decode.load_draft_config(model)
        self._width = decode.verify_width
        self._stages = [_layers(model, self._p, stage) for stage in range(self._p.stages)]
        self._whole = _layers(model, self._d, 0)
        self._hbm = constants.number("hbm_bytes_per_s")
        self._flops = constants.number("dense_flops_per_s")
        self._link = constants.number("nvlink_bytes_per_s") * constants.number("nvlink_share")
        self._taps = [self._tap_count(window) for window in self._p.windows]
        self._drafter = self._drafter_parameters()
        self._scan = constants.points("kda_scan_s")
        self._mla_rate = constants.points("mla_decode_bytes_per_s")
        self._experts = {28: constants.points("experts_28_s"), 112: constants.points("experts_112_s")}
        self._number = {
            name: constants.number(name)
            for name in (
                "attention_flops_per_s", "expert_skew", "low_latency_s", "low_latency_width", "normal_s", "collective_s",
                "eager_layer_s", "graph_layer_s", "draft_s", "sample_s",
            )
        }  # fmt: skip
        self._rounds: dict[tuple[int, int, int], float] = {}

    # ---- prefill
    def stage(self, stage: int, chunks: Sequence[Chunk]) -> float:
        """One step: the batch's tokens through the stage's layers, and on the last stage context rows, head and drafter."""
        layers, tokens = self._stages[stage], sum(chunk.end - chunk.start for chunk in chunks)
        model, heads = self._model, self._model.num_attention_heads // self._p.tp_size
        pairs = sum(chunk.end**2 - chunk.start**2 for chunk in chunks) / 2
        attention = (
            2 * heads * (model.mla_row + model.kv_lora_rank) * pairs * layers.mla / self._number["attention_flops_per_s"]
        )
        scan = layers.kda * interpolate(self._scan, tokens) * (model.kda_num_heads / self._p.tp_size) / SCAN_HEADS
        own = self._dense(layers, tokens) + self._mixing(layers, tokens) + attention + scan + self._normal_moe(layers, tokens)
        own += 2 * layers.count * self._all_reduce(tokens)
        own = max(own, layers.count * self._number["eager_layer_s"])
        return own + self._context(stage, tokens) + self._ends(stage, sum(chunk.last for chunk in chunks))

    def hop(self, stage: int, tokens: int) -> float:
        """Prefix, closed blocks and the drafter's sum of every token, from each rank to its like on the next node."""
        vectors = 1 + self._model.closed_blocks_before(self._p.windows[stage].stop)
        context = 4 * self._draft.hidden_size if isinstance(self._draft, DraftConfig) else 0
        return tokens * (vectors * self._model.hidden_size * ITEM + context) / self.nic

    def _context(self, stage: int, tokens: int) -> float:
        """The taps' projections, and on the last stage the context rows of every draft layer."""
        if not isinstance(self._draft, DraftConfig):
            return 0.0
        width = self._draft.hidden_size
        parameters = self._taps[stage] * width * width
        if stage == self._p.last_stage:
            parameters += self._draft.num_hidden_layers * width * self._draft.mla_row
        return self._product(parameters, tokens)

    def _ends(self, stage: int, prompts: int) -> float:
        """First tokens and windows of the prompts that end in this step."""
        if stage < self._p.last_stage or not prompts:
            return 0.0
        head = self._model.vocab_size * self._model.hidden_size // self._p.tp_size
        return self._product(head, prompts) + self._number["sample_s"] + self._draft_block(prompts)

    def _normal_moe(self, layers: Layers, tokens: int) -> float:
        model, ranks = self._model, self._p.ep_size
        routed = tokens * model.num_experts_per_token / ranks * self._number["expert_skew"]
        row, slice_ = model.routed_expert_hidden_size * ITEM, tokens / self._p.tp_size
        elsewhere = (ranks - 1) * (1 - (1 - 1 / ranks) ** model.num_experts_per_token)  # ranks that want a row
        legs = self._number["normal_s"] + 2 * slice_ * elsewhere * row / self._link
        gather = self._number["collective_s"] + tokens * row / self._link
        return layers.moe * (self._routed(model.num_experts // ranks, routed) + legs + gather)

    # ---- decode
    def round(self, it: Round) -> tuple[float, ...]:
        """Each replica's layers; all wait for both expert legs, so the fixed part is common."""
        key = (it.bucket, it.width, it.proposals)
        if key not in self._rounds:
            self._rounds[key] = self._fixed_round(*key)
        layers, row_bytes = self._whole, self._model.mla_row * ITEM
        draft = self._draft.cache_layers if self._draft is not None and it.proposals else 0
        rate = interpolate(self._mla_rate, it.width)
        return tuple(self._rounds[key] + (layers.mla + draft) * context * row_bytes / rate for context in it.contexts)

    def _fixed_round(self, bucket: int, width: int, proposals: int) -> float:
        """All but the cached rows: it follows from the shape."""
        if bucket == 0:
            return 0.0
        model, layers, rows = self._model, self._whole, bucket * width
        heads = model.kda_num_heads // self._d.tp_size
        state = bucket * heads * model.kda_head_dim**2 * 4
        kda = layers.kda * state * (4 if width > 1 else 2) / self._hbm  # verify reads, commit reads and writes
        head = self._product(model.vocab_size * model.hidden_size // self._d.tp_size, rows) + self._number["sample_s"]
        own = self._dense(layers, rows) + self._mixing(layers, rows) + kda + self._low_latency_moe(layers, rows)
        own += 2 * layers.count * self._all_reduce(rows) + layers.count * self._number["graph_layer_s"]
        return own + head + (self._draft_block(bucket) if proposals else 0.0)

    def _low_latency_moe(self, layers: Layers, rows: int) -> float:
        model, ranks = self._model, self._d.ep_size
        source = -(-rows // self._d.tp_size)
        routed = source * model.num_experts_per_token * self._number["expert_skew"]  # as many come as go
        nodes = -(-ranks // GPUS_OF_A_NODE)
        sent = source * model.num_experts_per_token * (self._number["low_latency_width"] * ITEM + 16)
        legs = self._number["low_latency_s"] + 2 * sent * (1 - 1 / nodes) / self.nic + 2 * sent / nodes / self._link
        gather = self._number["collective_s"] + rows * model.routed_expert_hidden_size * ITEM / self._link
        return layers.moe * (self._routed(model.num_experts // ranks, routed) + legs + gather)

    # ---- both
    def _product(self, parameters: float, rows: float) -> float:
        """A matrix product: the larger of reading the weights and of the arithmetic."""
        return max(parameters * ITEM / self._hbm, 2 * parameters * rows / self._flops)

    def _dense(self, layers: Layers, rows: int) -> float:
        """Projections, dense and shared MLPs on all rows; router and down-projection on a slice."""
        whole = layers.attention + layers.dense + layers.shared
        return self._product(whole, rows) + self._product(layers.sliced, rows / self._d.tp_size)

    def _mixing(self, layers: Layers, rows: int) -> float:
        return layers.mixed * rows * self._model.hidden_size * ITEM / self._hbm

    def _all_reduce(self, rows: int) -> float:
        size = self._p.tp_size
        return self._number["collective_s"] + 2 * (size - 1) / size * rows * self._model.hidden_size * ITEM / self._link

    def _routed(self, local: int, rows: float) -> float:
        """The measured curve of the nearest number of local experts; work and weights grow with the number."""
        nearest = min(self._experts, key=lambda count: abs(count - local))
        share = local / nearest
        return interpolate(self._experts[nearest], rows / share) * share

    def _draft_block(self, requests: int) -> float:
        if self._draft is None:
            return 0.0
        return self._product(self._drafter, requests * (self._width - 1)) + self._number["draft_s"]

    def _tap_count(self, window: range) -> int:
        return len(taps_in(self._draft.taps(self._p.num_layers), window)) if isinstance(self._draft, DraftConfig) else 0

    def _drafter_parameters(self) -> int:
        """Of one drafting pass on one rank, the target's head included. A NextN layer's routed experts are left to draft_s."""
        model = self._model
        head = model.vocab_size * model.hidden_size // self._d.tp_size
        if isinstance(self._draft, DraftConfig):
            part = DraftPart((), network=True, embedding=False)
            targets = dspark_targets(self._draft, part, sharding.Share(0, self._d.tp_size))
            tables = ("markov_head.markov_w1.weight",)  # rows are looked up
            return head + sum(prod(target.shape) for target in targets if target.name not in tables)
        return head


def _layers(model: ModelConfig, topology: Topology, stage: int) -> Layers:
    """Sums over a stage's weights by what their rows are."""
    place = topology.place_of(topology.rank_of(stage, 0, 0))
    sums = {"attention": 0, "dense": 0, "shared": 0, "sliced": 0}
    for target in sharding.stage_targets(model, topology, place):
        if kind := _kind(target.name):
            sums[kind] += prod(target.shape)
    window = place.window
    mla = sum(model.is_mla(layer) for layer in window)
    candidates = sum(2 * (model.closed_blocks_before(layer) + 2) for layer in window)  # read by both mixes, and written
    moe = sum(not model.is_dense(layer) for layer in window)
    return Layers(len(window) - mla, mla, moe, mixed=candidates, **sums)


def _kind(name: str) -> str | None:
    if ".self_attn." in name:
        return "attention"
    if ".mlp." in name:
        return "dense"
    if ".shared_experts." in name or "routed_expert_up_proj" in name:
        return "shared"
    if "routed_expert_down_proj" in name or name.endswith(".gate.weight"):
        return "sliced"
    return None
