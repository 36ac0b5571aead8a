"""Where a rank computes, and how values get there: work is queued on the device and nobody waits for it but where a result is
read."""

import queue
import resource
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from k3mesh.errors import ConfigError
from services.contracts import argument_rules as rules
from services.contracts.arguments import WorkerArguments
from services.contracts.barriers import Notice
from services.runtime.telemetry import log

CPU = torch.device("cpu")


def device_of(a: WorkerArguments) -> torch.device:
    """This rank's: the CPU, or its GPU, which local ranks take in turn from --base-gpu-id on. Several ranks may share one, as
    far as what connects them can. ConfigError if a GPU is wanted and torch sees none."""
    if not rules.runs_on_gpu(a, torch.cuda.is_available()):
        return CPU
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError("--device cuda: torch sees no NVIDIA GPU; check its driver and CUDA_VISIBLE_DEVICES", param="device")
    return torch.device("cuda", (a.base_gpu_id + a.rank % a.nprocs_per_node) % count)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, by way of pinned memory and in the order of its work; on a CPU the tensor itself."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Return when all that is queued for computing has been done; what travels may still do so."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def memory_peak(device: torch.device, pools: int) -> int:
    """Bytes that this process has had at most: of its GPU, `pools` beside what torch manages; on a CPU, of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) + pools
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class DeviceOrder:
    """Passes notices on when the device has done what was queued before them, in order: what they tell of is in memory then.
    Its thread waits in the device thread's place."""

    def __init__(self, post: Callable[[Notice], None]):
        self._post = post
        self._marks: queue.SimpleQueue[tuple[torch.cuda.Event, Notice]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="device-order", daemon=True).start()

    def __call__(self, notice: Notice) -> None:
        """On the device thread."""
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._marks.put((event, notice))

    def _run(self) -> None:
        try:
            while True:
                event, notice = self._marks.get()
                event.synchronize()
                self._post(notice)
        except RuntimeError as error:  # the device thread meets it too, and ends the epoch
            log.error("the device failed", exc_info=error)


def in_device_order(post: Callable[[Notice], None], device: torch.device) -> Callable[[Notice], None]:
    """`post`, or on a GPU a DeviceOrder before it; on a CPU all that was called before has been done."""
    return DeviceOrder(post) if device.type == "cuda" else post
