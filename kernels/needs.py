"""What a backend needs of the machine, said as a reason why it is not there."""

from importlib import import_module

import torch


def lacks_gpu(device: torch.device, capability: tuple[int, int] = (8, 0), exactly: bool = False) -> str | None:
    """Why `device` is no NVIDIA GPU of at least, or `exactly`, a compute capability."""
    wanted = f"needs an NVIDIA GPU of compute capability {capability[0]}.{capability[1]}{'' if exactly else ' or later'}"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{wanted}, this is {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < capability or (exactly and found != capability):
        return f"{wanted}, this has {found[0]}.{found[1]}"
    return None


def lacks_package(name: str, extra: str = "cuda") -> str | None:
    """Why a package cannot be imported, and what installs it."""
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            return f"{name} does not load: {error}"
        return f"{name} is not installed; pip install k3mesh[{extra}]"
    except (ImportError, OSError) as error:  # built for another torch or CUDA
        return f"{name} does not load: {error}"
    return None
