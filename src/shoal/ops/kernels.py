"""The one dispatch to the kernels of our own: `kernels/triton.py` on CUDA, `kernels/native.py` on the CPU. A kernel that both
have has the same name in both."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from shoal.kernels import native, triton

if TYPE_CHECKING:
    from shoal.kernels.world import World


def for_device(device: torch.device) -> ModuleType:
    """The module with the kernels for a device."""
    return native if device.type == "cpu" and not triton.INTERPRET else triton


def find(name: str, device: torch.device) -> Callable[..., Any] | None:
    """A kernel that not every device has."""
    return getattr(for_device(device), name, None)


def fuse_world(world: World) -> str | None:
    """Make one kernel of a world's step. None when done; otherwise a sentence that says why not."""
    from shoal.kernels.world import fuse  # here: only fused runs need the tracer

    return fuse(world)
