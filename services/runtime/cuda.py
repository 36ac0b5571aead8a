"""A CUDA device for processes that share its memory: allocations, and their handles in other processes (CUDA IPC).

By the driver's own interface (cuda.bindings, which UCXX brings), so that a transfer agent needs no torch. It works in the
device's primary context, which is torch's too.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver, nvrtc  # pyright: ignore[reportAttributeAccessIssue] (compiled)

from k3mesh.errors import ConfigError, Internal
from services.runtime.worker_line import HANDLE_BYTES


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the driver's function returns beside its status. Internal if it fails."""
    status, *values = function(*arguments)
    if status.value:
        raise Internal(f"{function.__name__} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


class Device:
    """One device, by its number or its UUID. Its context is made current on the calling thread; others call `enter`."""

    def __init__(self, ordinal: int):
        """ConfigError if there is no such device here, or no CUDA at all."""
        count = device_count()
        if not 0 <= ordinal < count:
            raise ConfigError(f"CUDA device {ordinal}: {count} are visible here; correct CUDA_VISIBLE_DEVICES")
        self.ordinal = ordinal
        self._device = call(driver.cuDeviceGet, ordinal)
        self.uuid = bytes(call(driver.cuDeviceGetUuid, self._device).bytes)
        self._context = call(driver.cuDevicePrimaryCtxRetain, self._device)
        self.quick = ctypes.PyDLL("libcuda.so.1")
        self.enter()

    @classmethod
    def with_uuid(cls, uuid: bytes) -> "Device":
        """ConfigError if it is not visible to this process."""
        uuids = [bytes(call(driver.cuDeviceGetUuid, call(driver.cuDeviceGet, n)).bytes) for n in range(device_count())]
        if uuid not in uuids:
            seen = ", ".join(it.hex() for it in uuids) or "none"
            raise ConfigError(
                f"CUDA device {uuid.hex()}, on which the worker's pools are, is not visible here (seen: {seen}); give worker "
                "and agent the same CUDA_VISIBLE_DEVICES"
            )
        return cls(uuids.index(uuid))

    @property
    def multiprocessors(self) -> int:
        return call(
            driver.cuDeviceGetAttribute, driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self._device
        )

    def enter(self) -> None:
        """Make the context current on the calling thread."""
        _check(self.quick.cuCtxSetCurrent(ctypes.c_void_p(int(self._context))), "cuCtxSetCurrent")

    def allocate(self, length: int) -> "Allocation":
        """Zeroed, and an allocation of its own, as a handle names a whole one. ConfigError if the memory is not there."""
        status, address = driver.cuMemAlloc(length)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = call(driver.cuMemGetInfo)
            raise ConfigError(
                f"{length / 1e9:.2f} GB of CUDA device {self.ordinal} are wanted, {free / 1e9:.2f} of {total / 1e9:.2f} GB are "
                "free; give fewer blocks, slots or staging frames"
            )
        if status.value:
            raise Internal(f"cuMemAlloc of {length} bytes failed: {status.name}")
        call(driver.cuMemsetD8, address, 0, length)
        call(driver.cuCtxSynchronize)
        return Allocation(self, int(address), length)

    def open(self, handle: bytes) -> int:
        """The address in this process of another's allocation, until this one ends. ConfigError if the handle names none."""
        it = driver.CUipcMemHandle()
        ctypes.memmove(it.getPtr(), handle, HANDLE_BYTES)
        flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        status, address = driver.cuIpcOpenMemHandle(it, flag)
        if status.value:
            raise ConfigError(f"the worker's CUDA memory cannot be opened by its handle: {status.name}; see the worker's log")
        return int(address)

    def compile(self, source: str, names: Sequence[str]) -> list[Any]:
        """Kernels of a CUDA C++ source, for this device. Internal with the compiler's log if it does not compile."""
        major, minor = (
            call(driver.cuDeviceGetAttribute, getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{it}"), self._device)
            for it in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
        )
        try:
            program = call(nvrtc.nvrtcCreateProgram, source.encode(), b"kernels.cu", 0, [], [])
        except RuntimeError as error:  # there is no such library
            raise ConfigError(f"CUDA's run-time compiler is missing ({error}); install nvidia-cuda-nvrtc") from None
        options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17"]
        status, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status.value:
            log = bytearray(call(nvrtc.nvrtcGetProgramLogSize, program))
            call(nvrtc.nvrtcGetProgramLog, program, log)
            raise Internal(f"the CUDA kernels do not compile: {bytes(log).decode(errors='replace')}")
        image = bytearray(call(nvrtc.nvrtcGetCUBINSize, program))
        call(nvrtc.nvrtcGetCUBIN, program, image)
        module = call(driver.cuModuleLoadData, bytes(image))
        return [call(driver.cuModuleGetFunction, module, name.encode()) for name in names]


class Stream:
    """A queue of work on a device. Its methods only put something on it, and keep the interpreter's lock meanwhile: to give
    it up and wait for it again takes longer than the call wherever other threads are busy."""

    def __init__(self, device: Device):
        self._driver = device.quick
        device.enter()
        self._stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.handle = ctypes.c_void_p(int(self._stream))

    def write(self, address: int, source: int, length: int) -> None:
        """From pinned host memory to the device."""
        self._put("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), ctypes.c_void_p(source), ctypes.c_size_t(length))

    def copy(self, target: int, source: int, length: int) -> None:
        """On the device."""
        self._put("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(length))

    def launch(self, kernel: Any, blocks: int, threads: int, *arguments: int) -> None:
        """A kernel whose arguments have 64 bits each."""
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        base, size = ctypes.addressof(values), ctypes.sizeof(ctypes.c_uint64)
        places = (ctypes.c_void_p * len(arguments))(*(base + n * size for n in range(len(arguments))))
        status = self._driver.cuLaunchKernel(
            ctypes.c_void_p(int(kernel)), *map(ctypes.c_uint, (blocks, 1, 1, threads, 1, 1, 0)), self.handle, places, None
        )
        _check(status, "cuLaunchKernel")

    def _put(self, name: str, *arguments: Any) -> None:
        _check(getattr(self._driver, name)(*arguments, self.handle), name)


class Event:
    """A mark on a stream, to be asked for. Keeps the interpreter's lock, as Stream does."""

    def __init__(self, device: Device):
        self._driver = device.quick
        self._event = call(driver.cuEventCreate, driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._handle = ctypes.c_void_p(int(self._event))

    def record(self, stream: Stream) -> None:
        """Behind all that is on the stream now."""
        _check(self._driver.cuEventRecord(self._handle, stream.handle), "cuEventRecord")

    @property
    def reached(self) -> bool:
        """What was before it when it was recorded has been done."""
        status = self._driver.cuEventQuery(self._handle)
        if status == driver.CUresult.CUDA_ERROR_NOT_READY.value:
            return False
        _check(status, "cuEventQuery")
        return True


def _check(status: int, name: str) -> None:
    if status:
        raise Internal(f"{name} failed: {driver.CUresult(status).name}")


class Allocation:
    """Device memory of this process, freed with the last reference. numpy's and torch's bytes by `__cuda_array_interface__`."""

    def __init__(self, device: Device, address: int, length: int):
        self.device, self.address, self.length = device, address, length

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return array_interface(self.address, self.length)

    def handle(self) -> bytes:
        """What another process opens it by."""
        self.device.enter()
        it = call(driver.cuIpcGetMemHandle, self.address)
        return ctypes.string_at(it.getPtr(), HANDLE_BYTES)

    def __del__(self) -> None:
        driver.cuMemFree(self.address)


def array_interface(address: int, length: int) -> dict[str, Any]:
    """`length` bytes of device memory, as version 3 of the CUDA array interface has them."""
    return {"shape": (length,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}


def device_count() -> int:
    """ConfigError where CUDA is not."""
    try:
        call(driver.cuInit, 0)
        return call(driver.cuDeviceGetCount)
    except (Internal, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"CUDA cannot be used here ({error}); install NVIDIA's driver, or keep the pools on the CPU"
        ) from None
