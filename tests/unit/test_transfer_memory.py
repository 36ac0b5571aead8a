"""What an agent takes for what its worker exports, and pairs whose memories do not go together."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3mesh.errors import ConfigError
from services.kvtransfer.frames import HostMemory
from services.kvtransfer.link import Hello
from services.kvtransfer.memory import open_export, profile_of
from services.kvtransfer.peers import Peers, PeerServer
from services.kvtransfer.session import Limits
from services.kvtransfer.transport import CUDA, HOST
from services.runtime.worker_line import CudaArena
from tests.lib.transfer import record

LIMITS = Limits(frame_bytes=64 << 10, frames=2)
ON_GPU = CudaArena(bytes(64), bytes(16))


def test_the_kind_of_arenas_says_how_frames_travel():
    assert profile_of([]) is HOST and profile_of([ON_GPU]) is CUDA
    assert "cuda_ipc" in CUDA.environment["UCX_TLS"] and "cuda" not in HOST.environment["UCX_TLS"]
    assert (HOST.frame_bytes, HOST.frames, CUDA.frame_bytes, CUDA.frames) == (32 << 20, 4, 320 << 20, 6)
    assert (HOST.piece_bytes, CUDA.piece_bytes) == (1 << 20, 112 << 20)


def test_mapped_arenas_are_a_cpu_s_memory():
    place = record("decode")
    arenas = [os.memfd_create(arena.name) for arena in place.arenas]
    for arena, it in zip(arenas, place.arenas, strict=True):
        os.truncate(arena, it.length)
    memory = open_export(place, [], arenas, LIMITS)
    assert isinstance(memory, HostMemory) and memory.checksum == "xxh3_64"


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_pools_on_a_gpu_are_refused_where_there_is_no_cuda():
    place = record("decode")
    with pytest.raises(
        ConfigError, match=r"CUDA cannot be used here .*; install NVIDIA's driver, or keep the pools on the CPU"
    ):
        open_export(place, [ON_GPU] * len(place.arenas), [], LIMITS)


def test_agents_whose_frames_have_different_checksums_refuse_each_other_and_name_both():
    mover: Any = None  # nobody gets as far as that
    service = PeerServer(Peers(record("prefill"), Limits(), b"", "xxh3_64", mover, lambda event: None))
    peer = Hello(record("decode"), b"", 1, 1, Limits().frame_bytes, Limits().piece_bytes, "xxh3_64")
    service._check(peer)
    with pytest.raises(ConfigError, match=r"'xxh3_64' on prefill-0 rank 0 and 'sum64' on decode-0 rank 0; put") as refused:
        service._check(replace(peer, checksum="sum64"))
    assert refused.value.detail == "PD_CONTRACT"
    with pytest.raises(ConfigError, match=r"pieces of frames have 1048576 bytes on prefill-0 rank 0 and 4096 on decode-0"):
        service._check(replace(peer, piece_bytes=4096))
