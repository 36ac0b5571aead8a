"""Where training runs, and what is compiled there."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def prepare() -> torch.device:
    """The device. One compiled function serves norms and activations of many widths, so the compiler may keep many variants."""
    torch._dynamo.config.recompile_limit = 128
    if torch.cuda.is_available():
        return torch.device("cuda")
    torch.set_num_threads(1)
    return torch.device("cpu")


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products on a GPU, float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def compiled(function: Function) -> Function:
    """Fuses a function's elementwise work on a GPU; a small CPU test runs it as it is written."""
    return cast(Function, torch.compile(function, dynamic=False)) if torch.cuda.is_available() else function


def eager() -> AbstractContextManager[Any]:
    """For shapes that occur once."""
    return cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager"))
