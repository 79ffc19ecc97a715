"""The one dispatch to the kernels of our own: `kernels/triton.py` on CUDA, `kernels/native.py` on the CPU. A kernel that both
have has the same name in both."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from shoal.kernels import native, triton


def for_device(device: torch.device) -> ModuleType:
    return native if device.type == "cpu" and not triton.INTERPRET else triton


def find(name: str, device: torch.device) -> Callable[..., Any] | None:
    """A kernel that not every device has."""
    return getattr(for_device(device), name, None)
