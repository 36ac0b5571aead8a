"""Where one rank's cache units lie and what a handoff must bring: placement records (fp/1), the pair check, manifests
(rm/1) and expected sets (spec cache-and-handoff §3 to §8). Which fields a stage owns is geometry.Geometry's to say.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from k3mesh.errors import ConfigError, TransferFailed
from services.contracts.geometry import ARENAS, PAGED, SLOT, Field, Geometry, blocks_for
from services.contracts.ids import BLOCK_TOKENS, BlockId, RequestId, Room, SlotId
from services.contracts.topology import RankPlace

CONTRACT = "fp/1"
ALIGNMENT = 64  # bytes, of every unit
ENCODING_LIMIT = 256 << 10  # bytes of a record's canonical encoding
OWN = ("engine_epoch", "stage", "tp_rank", "dp_rank", "global_rank")  # of one rank or one life; not in the fingerprint
SAME = (
    "contract",
    "model_fingerprint",
    "draft_fingerprint",
    "block_tokens",
    "verify_width",
    "speculative_algorithm",
    "tp_size",
)
FAULTS_TOLD = 20  # of a pair that does not fit; a wrong dtype is a fault of every field
SAME_FIELD = ("layer", "kind", "dtype", "shape", "parts", "payload")


@dataclass(frozen=True, slots=True)
class Arena:
    """One shared memory region of a rank."""

    arena_id: int
    name: str
    length: int


@dataclass(frozen=True, slots=True)
class FieldPlace:
    """One cache field in its arena: unit u begins at `offset + u * unit_stride` and has `payload` bytes."""

    field_id: str
    layer: int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    arena_id: int
    offset: int
    unit_stride: int
    payload: int
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """One rank's record, immutable for its epoch."""

    engine_id: str
    role: str  # "prefill" | "decode"
    engine_epoch: int
    stage: int
    num_stages: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    global_rank: int
    model_fingerprint: str
    draft_fingerprint: str
    num_blocks: int
    num_slots: int
    verify_width: int
    speculative_algorithm: str
    layer_lo: int  # target layers [lo, hi)
    layer_hi: int
    arenas: tuple[Arena, ...]
    fields: tuple[FieldPlace, ...]
    block_tokens: int = BLOCK_TOKENS
    contract: str = CONTRACT

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the canonical encoding of all that ranks of one stage share."""
        shared = {key: value for key, value in asdict(self).items() if key not in OWN}
        encoded = json.dumps(shared, sort_keys=True, separators=(",", ":")).encode()
        if len(encoded) > ENCODING_LIMIT:
            raise ConfigError(f"{self.name}: its placement record has {len(encoded)} bytes, the limit is {ENCODING_LIMIT}")
        return hashlib.sha256(encoded).hexdigest()

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.engine_id} rank {self.global_rank}"

    def units(self, field: FieldPlace) -> int:
        return self.num_blocks if field.kind == PAGED else self.num_slots

    @cached_property
    def largest_unit(self) -> int:
        return max((field.payload for field in self.fields), default=0)

    @cached_property
    def producer_steps(self) -> tuple[tuple[int, ...], ...]:
        """Indices into `fields` by producer step, as Geometry.producer_steps: each own layer, then the drafter's fields."""
        steps = [
            tuple(i for i, field in enumerate(self.fields) if field.layer == layer)
            for layer in range(self.layer_lo, self.layer_hi)
        ]
        draft = tuple(i for i, field in enumerate(self.fields) if field.layer >= self.layer_hi)
        return (*steps, draft) if draft else tuple(steps)

    def expected_bytes(self, positions: int) -> int:
        """What a stage with this record sends for a manifest of `positions` blocks."""
        return sum(field.payload * (positions if field.kind == PAGED else 1) for field in self.fields)

    def check(self) -> None:
        """Every unit lies in its arena, aligned and apart from the others of its field (§4 rule 4). Raises ConfigError."""
        if self.contract != CONTRACT:
            raise _refusal(f"{self.name}: contract {self.contract!r} is not {CONTRACT!r}; run the same release on both engines")
        if self.block_tokens != BLOCK_TOKENS:
            raise _refusal(f"{self.name}: block_tokens {self.block_tokens} is not {BLOCK_TOKENS}")
        arenas = {arena.arena_id: arena for arena in self.arenas}
        if len({field.field_id for field in self.fields}) != len(self.fields):
            raise _refusal(f"{self.name}: a field is listed twice")
        for field in self.fields:
            arena = arenas.get(field.arena_id)
            if arena is None:
                raise _refusal(f"{self.name}: field {field.field_id} names arena {field.arena_id}, which is not in the record")
            if field.kind not in (PAGED, SLOT) or field.payload < 1 or field.unit_stride < field.payload:
                raise _refusal(
                    f"{self.name}: field {field.field_id} has kind {field.kind!r}, payload {field.payload} and stride "
                    f"{field.unit_stride}; a unit has at least one byte and does not reach into the next"
                )
            if field.offset % ALIGNMENT or field.unit_stride % ALIGNMENT:
                raise _refusal(
                    f"{self.name}: field {field.field_id} at offset {field.offset}, stride {field.unit_stride} is not "
                    f"aligned to {ALIGNMENT} bytes"
                )
            end = field.offset + self.units(field) * field.unit_stride
            if end > arena.length:
                raise _refusal(
                    f"{self.name}: field {field.field_id} ends at {end}, behind the {arena.length} bytes of arena {arena.name}"
                )


def place(
    geometry: Geometry,
    rank: RankPlace,
    *,
    engine_id: str,
    engine_epoch: int,
    model_fingerprint: str,
    draft_fingerprint: str = "",
    num_blocks: int,
    num_slots: int,
    verify_width: int,
    speculative_algorithm: str = "NONE",
) -> Placement:
    """The record of a rank whose pools are plain arenas: field after field, unit after unit, both aligned.

    An arena without fields on this stage is left out; `arenas` is in the order in which their descriptors are handed over.
    """
    arenas: list[Arena] = []
    places: dict[str, FieldPlace] = {}
    fields = geometry.fields_of_stage(rank.stage)
    for name in ARENAS:
        offset = 0
        for field in (f for f in fields if f.arena == name):
            placed = _place(field, len(arenas), offset)
            places[field.field_id] = placed
            offset += (num_blocks if field.kind == PAGED else num_slots) * placed.unit_stride
        if offset:
            arenas.append(Arena(len(arenas), name, offset))
    topology = geometry.topology
    return Placement(
        engine_id=engine_id,
        role=topology.role,
        engine_epoch=engine_epoch,
        stage=rank.stage,
        num_stages=topology.stages,
        tp_rank=rank.tp,
        tp_size=topology.tp_size,
        dp_rank=rank.dp,
        dp_size=topology.dp_size,
        global_rank=rank.rank,
        model_fingerprint=model_fingerprint,
        draft_fingerprint=draft_fingerprint,
        num_blocks=num_blocks,
        num_slots=num_slots,
        verify_width=verify_width,
        speculative_algorithm=speculative_algorithm,
        layer_lo=rank.window.start,
        layer_hi=rank.window.stop,
        arenas=tuple(arenas),
        fields=tuple(places[field.field_id] for field in fields),
    )


def _place(field: Field, arena_id: int, offset: int) -> FieldPlace:
    return FieldPlace(
        field_id=field.field_id,
        layer=field.layer,
        kind=field.kind,
        dtype=field.dtype,
        shape=field.shape,
        arena_id=arena_id,
        offset=offset,
        unit_stride=-(-field.unit_bytes // ALIGNMENT) * ALIGNMENT,
        payload=field.unit_bytes,
        parts=field.parts,
    )


# ---- pair check
def pair_check(p_stages: Sequence[Placement], d: Placement) -> None:
    """Whether these stages of a prefill engine, all of one tensor-parallel rank, can fill this decode rank's cache.

    Raises ConfigError (detail PD_CONTRACT) that names every mismatch with its field and both values (§4 rules 1 to 5, §6).
    """
    d.check()
    for record, role in ((d, "decode"), *((p, "prefill") for p in p_stages)):
        if record.role != role:
            raise _refusal(f"{record.name}: role {record.role!r} where {role!r} is needed; correct the addresses of the pair")
    for index, p in enumerate(p_stages):
        p.check()
        if (p.stage, p.num_stages) != (index, len(p_stages)):
            raise _refusal(
                f"{p.name}: stage {p.stage} of {p.num_stages} stands at place {index} of {len(p_stages)} agents; "
                "list the agents of one tensor-parallel rank by stage"
            )
        if p.engine_id != p_stages[0].engine_id or p.engine_epoch != p_stages[0].engine_epoch:
            raise _refusal(f"{p.name} and {p_stages[0].name} are not of one engine epoch; restart the prefill engine")
    faults = [fault for p in p_stages for fault in _contract_faults(p, d)]
    faults += [
        fault for key in ("num_blocks", "num_slots") for p in p_stages for fault in _differs(key, p, p_stages[0])
    ]  # of one request's ids, on every stage
    _raise(faults + _field_faults(p_stages, d))


def check_contract(p: Placement, d: Placement) -> None:
    """What one stage can tell of a pair by itself: the values that all ranks of both engines share. Raises ConfigError."""
    _raise(_contract_faults(p, d))


def _contract_faults(p: Placement, d: Placement) -> list[str]:
    return [fault for key in (*SAME, "tp_rank") for fault in _differs(key, p, d)]


def _field_faults(p_stages: Sequence[Placement], d: Placement) -> list[str]:
    """Every field has one owner, and is the same on both sides but for where it lies."""
    faults: list[str] = []
    wanted = {field.field_id: field for field in d.fields}
    owners: dict[str, Placement] = {}
    for p in p_stages:
        for field in p.fields:
            owner = owners.setdefault(field.field_id, p)
            if owner is not p:
                faults.append(f"field {field.field_id} has two owners, {owner.name} and {p.name}")
            elif field.field_id not in wanted:
                faults.append(f"field {field.field_id} of {p.name} is not in the cache of {d.name}")
            else:
                for key in SAME_FIELD:
                    found, want = getattr(field, key), getattr(wanted[field.field_id], key)
                    if found != want:
                        faults.append(_difference(f"{field.field_id}.{key}", found, p, want, d))
    engine = p_stages[0].engine_id if p_stages else "any stage"
    return faults + [f"field {field} of {d.name} has no owner on {engine}" for field in wanted if field not in owners]


def _differs(key: str, one: Placement, other: Placement) -> list[str]:
    found, wanted = getattr(one, key), getattr(other, key)
    return [] if found == wanted else [_difference(key, found, one, wanted, other)]


def _difference(name: str, found: object, one: Placement, wanted: object, other: Placement) -> str:
    return f"{name} is {found!r} on {one.name} and {wanted!r} on {other.name}"


def _raise(faults: Sequence[str]) -> None:
    if faults:
        more = f"; and {len(faults) - FAULTS_TOLD} more" if len(faults) > FAULTS_TOLD else ""
        told = "; ".join(faults[:FAULTS_TOLD]) + more
        raise _refusal(f"{told}. Start both engines with one release, model, drafter and set of flags")


def _refusal(message: str) -> ConfigError:
    return ConfigError(message, detail="PD_CONTRACT")


# ---- manifests
@dataclass(frozen=True, slots=True)
class Manifest:
    """What one decode rank wants of a room and where it goes: block i of `blocks` is logical block prefix/128 + i."""

    request_id: RequestId
    room: Room
    attempt: int
    decode_epoch: int
    replica: int
    prefix_tokens: int
    prompt_tokens: int
    prompt_hash: bytes
    blocks: tuple[BlockId, ...]
    block_gens: tuple[int, ...]
    slot: SlotId
    slot_gen: int
    timeout: float  # seconds

    @property
    def first_block(self) -> int:
        """The logical block that position 0 is."""
        return self.prefix_tokens // BLOCK_TOKENS

    def check(self, d: Placement) -> None:
        """Count, range and prefix rules against the decode rank's record (§5). Raises TransferFailed (detail PD_MANIFEST)."""
        if self.decode_epoch != d.engine_epoch:
            raise TransferFailed(
                f"room {self.room:x}: the manifest is of epoch {self.decode_epoch}, {d.name} lives in {d.engine_epoch}",
                detail="PD_STALE",
            )
        if self.prefix_tokens % BLOCK_TOKENS or not self.prefix_tokens < self.prompt_tokens:
            raise self._refusal(
                f"prefix_tokens {self.prefix_tokens} must be a multiple of {BLOCK_TOKENS} and below prompt_tokens "
                f"{self.prompt_tokens}"
            )
        count = blocks_for(self.prompt_tokens) - self.first_block
        if len(self.blocks) != count or len(self.block_gens) != count:
            raise self._refusal(
                f"{len(self.blocks)} blocks and {len(self.block_gens)} generations for {self.prompt_tokens} tokens behind "
                f"{self.prefix_tokens}; {count} are needed"
            )
        if len(set(self.blocks)) != count or not all(1 <= block < d.num_blocks for block in self.blocks):
            raise self._refusal(f"block ids must be different and from 1 to {d.num_blocks - 1}: {list(self.blocks)}")
        if not 1 <= self.slot < d.num_slots:
            raise self._refusal(f"slot {self.slot} must be from 1 to {d.num_slots - 1}")

    def _refusal(self, rule: str) -> TransferFailed:
        return TransferFailed(f"room {self.room:x}: {rule}", detail="PD_MANIFEST")


def chunk_positions(manifest: Manifest, start: int, end: int, first: bool, last: bool) -> range:
    """Positions of the manifest's blocks that prompt chunk [start, end) completes (§8).

    The first submitted chunk brings also what P had in its own prefix cache; a block that is filled in part waits for a
    later chunk; the last chunk brings the rest.
    """
    begin = manifest.prefix_tokens if first else max(manifest.prefix_tokens, start)
    stop = blocks_for(manifest.prompt_tokens) if last else end // BLOCK_TOKENS
    low = begin // BLOCK_TOKENS - manifest.first_block
    return range(low, max(low, stop - manifest.first_block))
