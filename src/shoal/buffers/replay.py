"""A replay: the last steps of all rows, in a ring, and ways to draw from it.

    replay = ReplayBuffer(transition, initial_memory, steps, rows, device)     trees with the shapes of one step, [B, ...]
    replay.put(transitions, initial_memory)                                    trees of [T, B, ...]: what happened since
    replay.windows(slot, row, length)       trees of [length, K, ...] and, of `initial_memory`, [K, ...]

One record, a transition of one row, lies end to end in memory, a vector for each dtype: drawing is one gather a dtype, and the
leaves are views of it. Of `initial_memory` (an agent's memory, and whatever is constant over an episode) a sequence has what
held before its first transition alone.

Whoever draws keeps its place beside the ring: `Uniform`, `Prioritised` and `Episodes`. They give sequences that do not run past
the newest transition, and never one that was not written. Everything stays on the device: how much has been written is a
tensor, shapes are static, and uniform numbers are passed in, so that drawing can be captured. Those are float64, for float32
times a large ring misses most odd slots.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.spec import UserError
from shoal.tree import tree_leaves, tree_map

SHARE = 0.9  # of the memory that is free; the rest is for what learns


class Sample(NamedTuple):
    """Where windows begin, and what else is known of them."""

    slot: Tensor  # [K]
    row: Tensor  # [K]
    weight: Tensor | None = None  # [K] importance
    filled: Tensor | None = None  # [length, K] what belongs to it; none: all


@dataclass(frozen=True)
class Leaf:
    """Where one leaf of the tree lies in the records."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        return int(torch.Size(self.shape).numel())

    def viewed(self, part: Tensor) -> Tensor:
        """[..., width] in its own shape."""
        return part if len(self.shape) == 1 else part.unflatten(-1, self.shape) if self.shape else part[..., 0]

    def check(self, x: Tensor, lead: int, rows: int, k: int) -> None:
        if x.dtype != self.dtype or tuple(x.shape[lead:]) != self.shape or x.shape[lead - 1] != rows:
            raise UserError(
                f"tensor {k} of a transition is {list(self.shape)} of {self.dtype} for each of {rows} rows here; "
                f"one of {list(x.shape)} and {x.dtype} does not fit."
            )


class Records:
    """[steps, rows] of one tree, packed: a tensor [steps, rows, width] for each dtype."""

    def __init__(self, transition: Any, steps: int, rows: int, device: torch.device):
        self.tree, self.steps, self.rows = transition, steps, rows
        self.leaves: list[Leaf] = []
        self.widths: dict[torch.dtype, int] = {}
        for x in tree_leaves(transition):
            leaf = Leaf(x.dtype, self.widths.get(x.dtype, 0), tuple(x.shape[1:]))
            self.leaves.append(leaf)
            self.widths[x.dtype] = leaf.start + leaf.width
        self.device = device
        self.store: dict[torch.dtype, Tensor] = {}

    @property
    def bytes(self) -> int:
        return self.steps * self.rows * sum(w * dtype.itemsize for dtype, w in self.widths.items())

    def allocate(self) -> None:
        self.store = {d: torch.zeros(self.steps, self.rows, w, dtype=d, device=self.device) for d, w in self.widths.items()}

    def packed(self, tree: Any, lead: int) -> dict[torch.dtype, Tensor]:
        """A tree of leaves with `lead` dimensions before a record's, end to end."""
        if (given := len(tree_leaves(tree))) != len(self.leaves):
            raise UserError(f"a replay of {len(self.leaves)} tensors a transition was given {given}.")
        leaves: list[Tensor] = []
        tree_map(lambda _, x: leaves.append(x), self.tree, tree)  # by name, in whatever order they come
        parts: dict[torch.dtype, list[Tensor]] = {d: [] for d in self.widths}
        for k, (x, leaf) in enumerate(zip(leaves, self.leaves, strict=True)):
            leaf.check(x, lead, self.rows, k)
            parts[leaf.dtype].append(x.reshape(*x.shape[:lead], leaf.width))
        return {d: xs[0] if len(xs) == 1 else torch.cat(xs, -1) for d, xs in parts.items()}

    def put(self, tree: Any, slots: Tensor) -> None:
        for d, x in self.packed(tree, 2).items():
            self.store[d].index_copy_(0, slots, x)

    def take(self, places: Tensor) -> Any:
        """The records at these places (slot times rows, plus row), of any shape: a tree of [*places.shape, ...]."""
        flat = {d: x.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape) for d, x in self.store.items()}
        return self.unpacked(flat)

    def unpacked(self, flat: dict[torch.dtype, Tensor]) -> Any:
        parts = {d: iter(x.split([leaf.width for leaf in self.leaves if leaf.dtype == d], -1)) for d, x in flat.items()}
        views = iter([leaf.viewed(next(parts[leaf.dtype])) for leaf in self.leaves])
        return tree_map(lambda _: next(views), self.tree)


class ReplayBuffer:
    def __init__(self, transition: Any, initial_memory: Any, steps: int, rows: int, device: str | torch.device = "cpu"):
        """Nothing is allocated yet: `bytes` says what it will take, `allocate` refuses what there is not."""
        self.steps, self.rows, self.device = steps, rows, torch.device(device)
        shapes = [
            tree_map(lambda x: torch.empty(1, *x.shape[1:], dtype=x.dtype), tree) for tree in (transition, initial_memory)
        ]
        self.transitions, self.initial_memory = (Records(tree, steps, rows, self.device) for tree in shapes)
        self.count = torch.zeros((), dtype=torch.long, device=self.device)  # steps ever written

    @property
    def bytes(self) -> int:
        return self.transitions.bytes + self.initial_memory.bytes

    def allocate(self, free: Callable[[torch.device], int | None] | None = None) -> None:
        """Refuses, in a sentence, what does not fit into the memory that is free."""
        room = (free or free_bytes)(self.device)
        if room is not None and self.bytes > (room := int(room * SHARE)):
            most = int(self.steps * self.rows * room / self.bytes)
            raise UserError(
                f"a replay of {self.steps * self.rows:,} steps takes {size(self.bytes)} on {self.device}, and {size(room)} "
                f"can be had: give a smaller --algo.capacity, of {most:,} at most (COMA's --algo.replay counts episodes)."
            )
        self.transitions.allocate()
        self.initial_memory.allocate()

    def put(self, transitions: Any, initial_memory: Any) -> None:
        """Trees of [T, B, ...], the oldest first; beyond the ring's end it goes on at the beginning."""
        steps = tree_leaves(transitions)[0].shape[0]
        if steps > self.steps:
            raise UserError(
                f"a replay of {self.steps} steps a row was given {steps} at once: give it a larger --algo.capacity."
            )
        slots = self.slots(self.count + torch.arange(steps, device=self.device))
        self.transitions.put(transitions, slots)
        self.initial_memory.put(initial_memory, slots)
        self.count += steps

    def slots(self, steps: Tensor) -> Tensor:
        """Where steps, counted from the first ever, lie in the ring."""
        return steps.remainder(self.steps)

    @property
    def oldest(self) -> Tensor:
        return (self.count - self.steps).clamp(min=0)

    def windows(self, slot: Tensor, row: Tensor, length: int) -> tuple[Any, Any]:
        """So many steps on from each slot: trees of [length, K, ...], and of `initial_memory` [K, ...]."""
        steps = slot + torch.arange(length, device=self.device)[:, None]  # [L, K]
        return self.transitions.take(self.slots(steps) * self.rows + row), self.initial_memory.take(slot * self.rows + row)

    def __getitem__(self, at: tuple[slice, slice]) -> Any:
        """replay[times, rows]: transitions by age, the oldest is 0. For looking into it: it waits for the device."""
        n = int(self.count.clamp(max=self.steps))
        times = self.slots(self.oldest + torch.arange(n, device=self.device)[at[0]])
        rows = torch.arange(self.rows, device=self.device)[at[1]]
        return self.transitions.take(times[:, None] * self.rows + rows)

    # --- for exact resume: what was written from one step to another ---

    def read(self, begin: int, end: int) -> dict[str, Any]:
        """The records of steps [begin, end) as plain tensors on the CPU."""
        slots = self.slots(torch.arange(begin, end, device=self.device))
        parts = {"moments": self.transitions, "firsts": self.initial_memory}
        return {k: {str(d): x[slots].cpu() for d, x in r.store.items()} for k, r in parts.items()}

    def write(self, begin: int, end: int, saved: dict[str, Any]) -> None:
        slots = self.slots(torch.arange(begin, end, device=self.device))
        for k, records in {"moments": self.transitions, "firsts": self.initial_memory}.items():
            for d, x in records.store.items():
                given = saved[k].get(str(d)) if isinstance(saved.get(k), dict) else None
                if not isinstance(given, Tensor) or given.dtype != d or given.shape != (end - begin, *x.shape[1:]):
                    raise UserError("the replay that was saved with this run has other shapes than this run's.")
                x.index_copy_(0, slots, given.to(self.device))


# --- ways to draw ---


class Uniform:
    """Every window of so many steps as likely as any other."""

    def __init__(self, replay: ReplayBuffer, length: int):
        self.replay, self.length = replay, length

    def wrote(self, steps: int) -> None:
        """So many steps were put into the ring just now."""

    def draws(self, count: int) -> int:
        """Uniform numbers that it takes to draw `count` windows."""
        return count

    def draw(self, noise: Tensor, count: int) -> Sample:
        """noise [draws(count)] -> `count` windows."""
        r = self.replay
        n = (r.count.clamp(max=r.steps) - self.length + 1) * r.rows
        place = (noise * n).long()
        return Sample(r.slots(r.oldest + place // r.rows), place % r.rows)

    def learnt(self, sample: Sample, priority: Tensor | None) -> None:
        """What an update said of the windows that it was given."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        return None


# --- memory ---


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
