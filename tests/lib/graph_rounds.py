"""Rounds of two ranks that should be alike: requests come and go inside one bucket, widths change, some rounds are empty."""

from random import Random

import torch

from services.contracts.arguments import EngineArguments
from services.contracts.geometry import verify_widths
from services.worker.round_graphs import GraphRounds, Recorder, ladder
from services.worker.round_part import CapturedRounds
from services.worker.speculative.sampling import Sampling
from services.worker.wire import Mode
from tests.lib.drafted import Job, SpeculativeRank

RULES = (Sampling(0.0, 1.0, 0, 0), Sampling(0.9, 0.95, 40, 11))


def capture(rank: SpeculativeRank, recorder: Recorder, device: torch.device) -> GraphRounds:
    """Captures the rank's ladder, whose only bucket are all of its places, and makes it replay."""
    a = arguments(rank)
    graphs = GraphRounds(rank.decode.part, ladder(a, rank.forced), rank.PLACES, rank.width, device)
    graphs.capture(recorder)
    replay(rank, graphs)
    return graphs


def replay(rank: SpeculativeRank, graphs: CapturedRounds) -> None:
    rank.decode.replay(graphs)
    rank.mode = Mode.LOW_LATENCY_GRAPH


def arguments(rank: SpeculativeRank) -> EngineArguments:
    drafter = ["--speculative-algorithm", "MTP", "--speculative-num-draft-tokens", str(rank.width)] if rank.width > 1 else []
    places = str(rank.PLACES)
    buckets = ["--max-num-seqs", places, "--cudagraph-capture-sizes", places]
    return EngineArguments.parse(["--model", "m", "--disaggregation-mode", "decode", *buckets, *drafter])


def play(ranks: tuple[SpeculativeRank, SpeculativeRank], rounds: int, seed: int) -> int:
    """The same rounds on both, whose results must be equal -> how many live rows there were."""
    random, rows = Random(seed), 0
    jobs: dict[int, Job] = {}
    windows: dict[int, int] = {}  # tokens in each place's window
    width = ranks[0].width
    for _ in range(rounds):
        leaving = [place for place in jobs if random.random() < 0.15]
        for place in leaving:
            del jobs[place], windows[place]
        installs = ([], [])
        entering = [place for place in range(ranks[0].PLACES) if place not in jobs and random.random() < 0.4]
        for place in entering:
            prompt = [random.randrange(256) for _ in range(random.choice([3, 120, 127, 130]))]
            blocks = tuple(range(1 + 5 * place, 6 + 5 * place))
            jobs[place] = Job(prompt, place, 1 + place, blocks, random.choice(RULES))
            windows[place] = width
            for rank, into in zip(ranks, installs, strict=True):
                into.append(rank.install(jobs[place], rank.start(jobs[place])))
        now = random.choice([it for it in verify_widths(width) if it <= min(windows.values(), default=1)])
        following = random.choice(verify_widths(width))
        done = [
            rank.round(list(jobs.values()), into, leaving, now, following) for rank, into in zip(ranks, installs, strict=True)
        ]
        assert done[0].tokens == done[1].tokens
        windows = dict.fromkeys(jobs, following)
        rows += len(jobs) * now
    for rank in ranks:
        rank.round([], clears=list(jobs), width=1, following=1)
    return rows
