"""The process that moves frames: `python -m services.kvtransfer.mover_main DESCRIPTOR`, which its agent starts.

It holds the worker's pools, the staging memory and UCX, and an interpreter of its own, so that neither waits for the other's.
It ends with the agent: at the end of the socket, or by the kernel's hand.
"""

import os
import socket
import sys
from collections.abc import Callable

from k3mesh.errors import MeshError
from k3mesh.v1 import transfer_pb2
from services.contracts.messages import Failure
from services.kvtransfer.carrier import Carrier
from services.kvtransfer.memory import open_export, profile_of
from services.kvtransfer.mover_line import MoverEnd, Opened, Refused
from services.kvtransfer.session import Limits
from services.kvtransfer.transport import Profile, Transport
from services.runtime.process import die_with_parent, leave, rare_collections
from services.runtime.telemetry import configure_logging, log
from services.runtime.wire import read_placement
from services.runtime.worker_line import read_cuda_arenas


def run(transport: Callable[[Profile], Transport] = Transport) -> None:
    """Obey the agent until it is gone, then exit. `transport` makes the way for frames."""
    configure_logging("mover")
    die_with_parent()
    try:
        _serve(MoverEnd(socket.socket(fileno=int(sys.argv[1]))), transport)
    except Exception as error:
        log.error("crashed", exc_info=error)
        leave(1)
    leave(0)


def _serve(agent: MoverEnd, make_transport: Callable[[Profile], Transport]) -> None:
    opening = agent.opening()
    if opening is None:
        return
    wanted, descriptors = opening
    try:
        record = transfer_pb2.LocalMessage.FromString(wanted.export).export
        placement, cuda = read_placement(record), read_cuda_arenas(record)
        limits = Limits(frame_bytes=wanted.frame_bytes, frames=wanted.frames, piece_bytes=wanted.piece_bytes)
        memory = open_export(placement, cuda, descriptors, limits)
        transport = make_transport(profile_of(cuda))
    except MeshError as error:
        agent.tell([Refused(Failure.of(error))])
        return
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    carrier = Carrier(transport, memory, limits, placement.largest_unit, agent)
    rare_collections()
    agent.tell([Opened(transport.address, memory.checksum, memory.pinned)])
    carrier.run()


if __name__ == "__main__":
    run()
