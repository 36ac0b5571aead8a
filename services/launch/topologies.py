"""Named argument sets: both engines of a mesh on one machine, in the flags that `k3mesh serve` takes."""

import shlex
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArgumentSets:
    """What both engines get, and what each gets beside it."""

    common: list[str]
    prefill: list[str]
    decode: list[str]


CPU = """
    --dtype float32 --kv-cache-dtype float32
    --attention-backend reference --kda-backend reference --moe-backend reference --all2all-backend gloo
    --max-model-len 2048 --disable-kvstore
"""


def _sets(common: str, prefill: str, decode: str) -> ArgumentSets:
    return ArgumentSets(*(shlex.split(flags) for flags in (CPU + common, prefill, decode)))


TOPOLOGIES = {
    "laptop": _sets(
        "--attn-tp-size 1",
        "--disaggregation-mode prefill --pipeline-parallel-size 4 --expert-parallel-size 1"
        " --deepep-mode normal --max-num-seqs 16 --chunked-prefill-size 256",
        "--disaggregation-mode decode --data-parallel-size 2 --expert-parallel-size 2"
        " --deepep-mode auto --max-num-seqs 16 --max-cudagraph-capture-size 8 --low-latency-max-num-tokens-per-gpu 64",
    ),
    "laptop-tp2": _sets(
        "--attn-tp-size 2",
        "--disaggregation-mode prefill --pipeline-parallel-size 2 --expert-parallel-size 2"
        " --deepep-mode normal --max-num-seqs 16 --chunked-prefill-size 256",
        "--disaggregation-mode decode --data-parallel-size 2 --expert-parallel-size 4"
        " --deepep-mode auto --max-num-seqs 16 --max-cudagraph-capture-size 8 --low-latency-max-num-tokens-per-gpu 64",
    ),
}
