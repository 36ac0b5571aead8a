"""May a request come in, and what does it get (spec scheduling §3.2, §7; cache-and-handoff §5)."""

from collections.abc import Iterable, Sequence

from services.contracts.geometry import blocks_for
from services.contracts.ids import BLOCK_TOKENS, BlockKey
from services.contracts.placement import Manifest
from services.scheduler.decode.capacity import Holding, Load, Pool, choose, growth
from services.scheduler.decode.events import Failure, ReserveAsked
from services.scheduler.decode.request import Releasing, Request, Retracted, Retracting
from services.scheduler.decode.shape import EngineShape
from services.scheduler.prefix import held


def budget(asked: ReserveAsked, shape: EngineShape) -> int:
    """New tokens that the request may have: what it asks for, within the context length."""
    return min(asked.sampling.max_tokens, shape.max_model_len - asked.prompt_tokens)


def refusal(asked: ReserveAsked, shape: EngineShape) -> Failure | None:
    """Why this request can never be served here, however empty the engine is."""
    prompt, new = asked.prompt_tokens, asked.sampling.max_tokens
    if prompt < 1 or new < 1:
        return Failure("bad_request", f"prompt_tokens = {prompt}, max_tokens = {new}: both must be at least 1")
    if prompt >= shape.max_model_len:
        return Failure(
            "bad_request",
            f"prompt_tokens = {prompt}: must be below the context length {shape.max_model_len}; shorten the prompt",
        )
    total = prompt + budget(asked, shape)
    if total > shape.max_request_tokens:
        return Failure(
            "bad_request",
            f"prompt_tokens + max_tokens = {total}: one decode replica holds {shape.max_request_tokens} tokens; "
            "shorten the prompt or ask for fewer tokens",
        )
    return None


def admit(asked: ReserveAsked, shape: EngineShape, pools: Sequence[Pool], requests: Iterable[Request]) -> Holding | None:
    """A place, a slot and the prompt's blocks on the best replica, or None: no room now."""
    blocks = blocks_for(asked.prompt_tokens)
    ahead = growth(asked.prompt_tokens, budget(asked, shape) - 1, shape.rows_ahead, blocks)
    keys = asked.keys if shape.keys else ()
    replica = choose(_loads(shape, pools, requests, keys), blocks, ahead)
    return None if replica is None else pools[replica].take(blocks, keys)


def manifest(asked: ReserveAsked, shape: EngineShape, pool: Pool, holding: Holding, timeout: float) -> Manifest:
    """What the replica's agents are to receive, with the generations that a late write is told apart by. Blocks that are
    here already are not named: nobody writes to them."""
    wanted = holding.blocks[holding.found :]
    return Manifest(
        request_id=asked.request_id,
        room=asked.room,
        attempt=asked.attempt,
        decode_epoch=shape.epoch,
        replica=holding.replica,
        prefix_tokens=holding.found * BLOCK_TOKENS,
        prompt_tokens=asked.prompt_tokens,
        prompt_hash=asked.prompt_hash,
        blocks=tuple(wanted),
        block_gens=tuple(map(pool.blocks.generation, wanted)),
        slot=holding.slot,
        slot_gen=pool.slots.generation(holding.slot),
        timeout=timeout,
    )


def _loads(shape: EngineShape, pools: Sequence[Pool], requests: Iterable[Request], keys: Sequence[BlockKey]) -> list[Load]:
    promised, quarantined, closed = [0] * len(pools), [0] * len(pools), [False] * len(pools)
    for request in requests:
        state, replica = request.state, request.replica
        promised[replica] += request.growth(shape.rows_ahead)
        if isinstance(state, Releasing):
            quarantined[replica] += len(state.holding.own_blocks)
        elif isinstance(state, Retracting | Retracted):
            closed[replica] = True
    loads: list[Load] = []
    for pool in pools:
        found, at = pool.cache.find(keys), pool.replica
        loads.append(Load(pool, promised[at], quarantined[at], len(found), held(found), closed[at]))
    return loads
