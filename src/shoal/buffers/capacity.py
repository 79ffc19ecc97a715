"""How many bytes a replay takes, in words, and how many can be had."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.spec import UserError

SHARE = 0.9  # of the memory that is free; the rest is for what learns


def refuse_more_than_is_free(need: int, steps: int, device: torch.device, free: Callable[[torch.device], int | None]) -> None:
    """Refuse, in a sentence, a replay of so many `steps` that does not fit into the memory that is free."""
    room = free(device)
    if room is not None and need > (room := int(room * SHARE)):
        raise UserError(
            f"a replay of {steps:,} steps takes {size(need)} on {device}, and {size(room)} "
            f"can be had: give a smaller --algo.capacity, of {int(steps * room / need):,} at most "
            "(COMA's --algo.replay counts episodes)."
        )


def size(n: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if n < 999.5:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.3g} GB" if n < 999.5 else f"{n:,.0f} GB"


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be had; none where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        known.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            known.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:  # a container's own limit
        most, used, parts = (Path("/sys/fs/cgroup", f"memory.{k}").read_text() for k in ("max", "current", "stat"))
        cached = dict(line.split() for line in parts.splitlines())["inactive_file"]  # is given up when asked for
        known.append(int(most) - int(used) + int(cached))
    except (OSError, KeyError, ValueError):
        pass
    return min(known) if known else None
