"""Step 2: a mesh whose decode workers run every replayed round again eagerly (--graph-debug), while requests come and go:
routes, live counts and idle replicas change inside the captured batches."""

import asyncio

from services.launch.bench.load import Prompt, drive
from services.launch.bench.serve import totals
from services.launch.validate.report import Found, check, not_run
from services.launch.validate.site import Site
from services.worker.round_check import TOLERANCE

WAVES = (1, 7, 3, 16)  # requests at a time: below one of a tensor-parallel group of 8, and unequal over replicas
COMPARED = "replayed rounds against eager ones: logits, counts, KDA states"


def run(site: Site) -> Found:
    if not site.gpus:
        return [not_run(COMPARED, "CUDA graphs need a GPU; tests/kernels/test_graph_rounds.py emulates them")], {}
    with site.mesh("graphs", site.drafter(), "--graph-debug") as state:
        for wave, at_once in enumerate(WAVES):
            prompts = [Prompt([(31 * wave + 7 * n + i * i) % 500 for i in range(20 + 37 * n)]) for n in range(2 * at_once)]
            options = {"max_tokens": 24, "temperature": 0.8 * (wave % 2), "seed": wave, "ignore_eos": True}
            asyncio.run(drive(state.addresses()["url"], prompts, at_once, **options))
        counted = [it for name, it in asyncio.run(totals(state)).items() if name.startswith("decode-0.worker")]
    rounds = sum(it.get("graph_rounds_checked", 0) for it in counted)
    if not rounds:
        return [check(COMPARED, "no round was replayed; the decode worker's log says why", passed=False)], {}
    worst = max(it["graph_worst_difference_ppm"] for it in counted) / 1e6
    return [check(COMPARED, f"{rounds} rounds, worst difference {worst:.2g} of the size", True, f"at most {TOLERANCE:g}")], {}
