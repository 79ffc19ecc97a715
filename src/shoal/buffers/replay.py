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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.buffers.capacity import free_bytes, refuse_more_than_is_free
from shoal.spec import UserError
from shoal.tree import tree_leaves, tree_map


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
    width: int
    shape: tuple[int, ...]  # of one row, [B] left out


class Records:
    """[steps, rows] of one tree, packed: a tensor [steps, rows, width] for each dtype."""

    def __init__(self, transition: Any, steps: int, rows: int, device: torch.device):
        self.tree, self.steps, self.rows = transition, steps, rows
        self.leaves: list[Leaf] = []
        self.widths: dict[torch.dtype, int] = {}
        for x in tree_leaves(transition):
            leaf = Leaf(x.dtype, self.widths.get(x.dtype, 0), x[0].numel(), tuple(x.shape[1:]))
            self.leaves.append(leaf)
            self.widths[x.dtype] = leaf.start + leaf.width
        self.shapes = [(leaf.dtype, (rows, *leaf.shape)) for leaf in self.leaves]
        self.device = device
        self.store: dict[torch.dtype, Tensor] = {}

    @property
    def bytes(self) -> int:
        return self.steps * self.rows * sum(w * dtype.itemsize for dtype, w in self.widths.items())

    def allocate(self) -> None:
        self.store = {d: torch.zeros(self.steps, self.rows, w, dtype=d, device=self.device) for d, w in self.widths.items()}

    def put(self, tree: Any, slots: Tensor) -> None:
        """Write a tree of [T, B, ...] into these slots [T], the leaves of a dtype end to end."""
        if (given := len(tree_leaves(tree))) != len(self.leaves):
            raise UserError(f"a replay of {len(self.leaves)} tensors a transition was given {given}.")
        leaves: list[Tensor] = []
        tree_map(lambda _, x: leaves.append(x), self.tree, tree)  # by name, in whatever order they come
        if [(x.dtype, tuple(x.shape[1:])) for x in leaves] != self.shapes:
            raise UserError(self._misfit(leaves))
        parts: dict[torch.dtype, list[Tensor]] = {d: [] for d in self.widths}
        for x, leaf in zip(leaves, self.leaves, strict=True):
            parts[leaf.dtype].append(x.reshape(*x.shape[:2], leaf.width))
        for d, xs in parts.items():
            self.store[d].index_copy_(0, slots, xs[0] if len(xs) == 1 else torch.cat(xs, -1))

    def _misfit(self, leaves: list[Tensor]) -> str:
        """Which of these tensors is none of a transition."""
        k = next(k for k, x in enumerate(leaves) if (x.dtype, tuple(x.shape[1:])) != self.shapes[k])
        x, leaf = leaves[k], self.leaves[k]
        return (
            f"tensor {k} of a transition is {list(leaf.shape)} of {leaf.dtype} for each of {self.rows} rows here; "
            f"one of {list(x.shape)} and {x.dtype} does not fit."
        )

    def take(self, places: Tensor) -> Any:
        """The records at these places (slot times rows, plus row), of any shape: a tree of [*places.shape, ...]."""
        flat = {d: x.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape) for d, x in self.store.items()}
        return self.unpacked(flat)

    def unpacked(self, flat: dict[torch.dtype, Tensor]) -> Any:
        """Records [..., width] of each dtype as the tree of their leaves, which are views of them."""
        parts = (flat[leaf.dtype].narrow(-1, leaf.start, leaf.width) for leaf in self.leaves)
        views = iter([x.view(*x.shape[:-1], *leaf.shape) for x, leaf in zip(parts, self.leaves, strict=True)])
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
        refuse_more_than_is_free(self.bytes, self.steps * self.rows, self.device, free or free_bytes)
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
