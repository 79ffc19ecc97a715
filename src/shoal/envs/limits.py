"""Refuse worlds and rollouts that do not fit into memory, before they are made: a system hands out more memory than it has, and
kills the process that uses it."""

from __future__ import annotations

import math
import os

import torch

from shoal.spec import EnvSpec, UserError

ROW_BYTES = 128  # bytes that a row takes at least, of whatever world


def refuse_too_many_rows(rows: int, device: torch.device) -> None:
    """Rows of whatever world, before it is known what they see."""
    _refuse_bytes(rows * ROW_BYTES, device, f"{rows:,} rows")


def refuse_more_than_fits(spec: EnvSpec, device: torch.device, rows: int, steps: int) -> None:
    """The observations of every row in so many steps."""
    shapes = [(g.n, *s) for g in spec.groups for s in (g.obs.values() if isinstance(g.obs, dict) else (g.obs,))]
    each = sum(math.prod(s) * (1 if len(s) == 4 else 4) for s in shapes)  # a byte a pixel
    _refuse_bytes(rows * steps * each, device, f"{steps:,} steps of {rows:,} rows")


def _refuse_bytes(need: int, device: torch.device, what: str) -> None:
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > memory:
        sizes = f"they take {need / 1e9:,.0f} GB at least, and there are {memory / 1e9:,.0f}"
        raise UserError(f"there is not enough memory for {what}: {sizes}.")
