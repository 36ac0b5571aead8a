"""Named argument sets: both engines of a mesh, in the flags that `k3mesh serve` takes."""

import shlex
from dataclasses import dataclass
from typing import Literal

LocalTopology = Literal["laptop", "laptop-tp2", "one-gpu"]  # of one machine
TopologyName = Literal["laptop", "laptop-tp2", "one-gpu", "k3"]


@dataclass(frozen=True, slots=True)
class ArgumentSets:
    """What both engines get, and what each gets beside it. `{model}` is the mesh's --model."""

    common: list[str]
    prefill: list[str]
    decode: list[str]

    def engines(self, model: str) -> tuple[list[str], list[str]]:
        """The flags of the prefill and of the decode engine."""
        both = ["--model", model, *(word.replace("{model}", model) for word in self.common)]
        return [*both, *self.prefill], [*both, *self.decode]


CPU = """
    --device cpu --dtype float32 --kv-cache-dtype float32
    --attention-backend reference --kda-backend reference --moe-backend reference --all2all-backend gloo
    --max-model-len 2048 --disable-kvstore
"""


def _sets(common: str, prefill: str, decode: str) -> ArgumentSets:
    return ArgumentSets(*(shlex.split(flags) for flags in (common, prefill, decode)))


TOPOLOGIES = {
    "laptop": _sets(
        CPU + "--attn-tp-size 1",
        "--disaggregation-mode prefill --pipeline-parallel-size 4 --expert-parallel-size 1"
        " --deepep-mode normal --max-num-seqs 16 --chunked-prefill-size 256",
        "--disaggregation-mode decode --data-parallel-size 2 --expert-parallel-size 2"
        " --deepep-mode auto --max-num-seqs 16 --max-cudagraph-capture-size 8 --low-latency-max-num-tokens-per-gpu 64",
    ),
    "laptop-tp2": _sets(
        CPU + "--attn-tp-size 2",
        "--disaggregation-mode prefill --pipeline-parallel-size 2 --expert-parallel-size 2"
        " --deepep-mode normal --max-num-seqs 16 --chunked-prefill-size 256",
        "--disaggregation-mode decode --data-parallel-size 2 --expert-parallel-size 4"
        " --deepep-mode auto --max-num-seqs 16 --max-cudagraph-capture-size 8 --low-latency-max-num-tokens-per-gpu 64",
    ),
    "one-gpu": _sets(  # a rank of each engine on one GPU, each with half of it
        "--device cuda --world-size 1 --gpu-memory-utilization 0.45 --max-model-len 8192 --disable-kvstore",
        "--disaggregation-mode prefill --max-num-seqs 16 --chunked-prefill-size 4096",
        "--disaggregation-mode decode --max-num-seqs 32 --max-cudagraph-capture-size 32 --retraction-snapshot-ratio 0.1",
    ),
    "k3": _sets(  # 64 GPUs: the deployment guide's sets, and the context length that it leaves open
        "--speculative-draft-model-path {model}/dspark --speculative-algorithm DSPARK --speculative-num-draft-tokens 8"
        " --dtype bfloat16 --kv-cache-dtype bfloat16 --attention-backend flashmla --drafter-attention-backend flashmla"
        " --kda-backend flashkda --moe-backend marlin --all2all-backend deepep"
        " --world-size 32 --nnodes 4 --nprocs-per-node 8 --attn-tp-size 8 --dense-tp-size 8 --moe-tp-size 1"
        " --disable-kvstore --max-model-len 131072",
        "--disaggregation-mode prefill --pipeline-parallel-size 4 --data-parallel-size 1 --expert-parallel-size 8"
        " --deepep-mode normal --mm-encoder-tp-mode data --max-num-seqs 32 --chunked-prefill-size 8192",
        "--disaggregation-mode decode --pipeline-parallel-size 1 --data-parallel-size 4 --expert-parallel-size 32"
        " --deepep-mode auto --max-num-seqs 128 --max-cudagraph-capture-size 32",
    ),
}
