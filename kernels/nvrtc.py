"""CUDA C++ compiled when it is first needed, by CUDA's run-time compiler; kernels run on torch's current stream.

module = compiled(source, device)
module.launch("name", blocks, threads, shared_bytes, tensor, 3, 0.5)
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor


def missing() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue] (compiled)

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        return f"CUDA's run-time compiler cannot be used ({error}); install cuda-bindings and nvidia-cuda-nvrtc"
    return None


def _call(function: Any, *arguments: Any) -> Any:
    status, *values = function(*arguments)
    if status.value:
        raise RuntimeError(f"{function.__name__} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


@cache
def machine_code(source: str, architecture: str) -> bytes:
    """RuntimeError with the compiler's log if the source does not compile."""
    from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]

    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), b"kernels.cu", 0, [], [])
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    status, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status.value:
        log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize, program))
        _call(nvrtc.nvrtcGetProgramLog, program, log)
        raise RuntimeError(f"CUDA kernels do not compile: {log.decode(errors='replace')}")
    image = bytearray(_call(nvrtc.nvrtcGetCUBINSize, program))
    _call(nvrtc.nvrtcGetCUBIN, program, image)
    return bytes(image)


class Module:
    """The kernels of one source on one device."""

    def __init__(self, image: bytes):
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        self._driver = driver
        self._module = _call(driver.cuModuleLoadData, image)
        self._functions: dict[str, Any] = {}

    def function(self, name: str, shared: int) -> Any:
        if name not in self._functions:
            function = _call(self._driver.cuModuleGetFunction, self._module, name.encode())
            if shared > 48 << 10:
                attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _call(self._driver.cuFuncSetAttribute, function, attribute, shared)
            self._functions[name] = function
        return self._functions[name]

    def launch(self, name: str, blocks: int, threads: int, shared: int, *arguments: Tensor | int | ctypes.Structure) -> None:
        """Tensors go as their addresses, integers as 32 bits, structures by value. A kernel's `shared` is always the same."""
        values = [_value(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        function, stream = self.function(name, shared), torch.cuda.current_stream().cuda_stream
        launch = self._driver.cuLaunchKernel
        _call(launch, function, blocks, 1, 1, threads, 1, 1, shared, stream, ctypes.addressof(places), 0)


def _value(argument: Tensor | int | ctypes.Structure) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_uint64(argument.data_ptr())
    return ctypes.c_int32(argument) if isinstance(argument, int) else argument


@cache
def compiled(source: str, device: torch.device) -> Module:
    """For the device's own generation, with its own instructions (sm_90a)."""
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the device's context is there, and current
        return Module(machine_code(source, f"sm_{major}{minor}a"))
