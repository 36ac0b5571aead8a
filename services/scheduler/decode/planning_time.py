"""How long the planner takes for a round, measured without a shell: `python -m services.scheduler.decode.planning_time`.

Every place of every replica has a request that does not end; their positions are spread, so that blocks run full at all times.
The next round is planned while one is out, as the shell does it. Prints medians as one JSON object.
"""

import json
import sys
import time
from statistics import median

from pydantic import Field

from services.contracts.flags import FlagSet
from services.contracts.geometry import blocks_for
from services.contracts.ids import BLOCK_TOKENS, RequestId, Room, Token
from services.contracts.messages import Sampling
from services.scheduler.decode import events as ev
from services.scheduler.decode.planner import DecodePlanner
from services.scheduler.decode.shape import EngineShape

MAX_MODEL_LEN = 65_536
TOKEN = Token(5)
WARM_UP = 20  # rounds


class PlanningArguments(FlagSet):
    replicas: int = Field(default=4, ge=1, description="replicas of the engine")
    requests: int = Field(default=32, ge=1, description="requests of each")
    rounds: int = Field(default=400, ge=1, description="rounds that are timed")


def engine(a: PlanningArguments) -> DecodePlanner:
    """A planner whose every place is taken."""
    blocks = a.requests * blocks_for(MAX_MODEL_LEN + BLOCK_TOKENS) + 1
    shape = EngineShape(
        engine_id="decode-0", epoch=1, replicas=a.replicas, tp_size=1, places=a.requests, num_blocks=blocks,
        num_slots=a.requests + 1, verify_width=1, adaptive=False, max_model_len=MAX_MODEL_LEN, end_tokens=frozenset({Token(0)}),
        buckets=tuple(range(1, a.requests + 1)), graphs=True, request_timeout=600.0,
    )  # fmt: skip
    planner = DecodePlanner(shape)
    pair = ev.Pair(1)
    planner.apply(ev.PrefillPaired(pair, "prefill-0"), 0.0)
    for number in range(a.replicas * a.requests):
        room, request_id, prompt = Room(number + 1), RequestId(f"r{number}"), 1 + number * 37 % 1000
        sampling = Sampling(max_tokens=MAX_MODEL_LEN - prompt)
        asked = ev.ReserveAsked(pair, request_id, room, 1, prompt, b"", sampling, 0.0)
        effects = planner.apply(asked, 0.0)
        ranks = next(effect.ranks for effect in effects if isinstance(effect, ev.ExpectManifest))
        planner.apply(ev.ClientAttached(ev.Client(number), request_id, room), 0.0)
        for rank in ranks:
            planner.apply(ev.AgentRankReady(rank, room, 1, TOKEN, (TOKEN,), 0, 0.0, 0.0, 0), 0.0)
    return planner


def answer(plan: ev.RoundPlan) -> ev.RoundDone:
    return ev.RoundDone(
        plan.round_id, tuple(tuple(ev.PlaceTokens(place, (TOKEN,), (TOKEN,)) for place in part.live) for part in plan.replicas)
    )


def main(argv: list[str]) -> int:
    a = PlanningArguments.parse(argv)
    planner = engine(a)
    planning: list[float] = []
    results: list[float] = []
    out: list[ev.RoundPlan] = []
    now = 0.0
    for _ in range(WARM_UP + a.rounds):
        began = time.perf_counter()
        planned = []
        while (plan := planner.plan(now)) is not None:
            planned.append(plan)
        planning.append(time.perf_counter() - began)
        out += planned
        done = answer(out.pop(0))
        now += 0.005
        began = time.perf_counter()
        planner.apply(done, now)
        results.append(time.perf_counter() - began)
    figures = {"planning_ms": planning, "results_ms": results}
    print(json.dumps({name: round(median(times[WARM_UP:]) * 1000, 4) for name, times in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
