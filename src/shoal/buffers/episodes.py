"""Drawing whole episodes from a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.buffers.replay import ReplayBuffer, Sample, Uniform


class Episodes(Uniform):
    """Whole episodes, each as likely as any other: windows as long as the longest can be, from an episode's first step on, and
    `filled` [length, K], which is false beyond its last. `over(transitions)` says which leaf [..., B] ends an episode.

    Without replacement no episode comes twice in a batch; where there are fewer than asked for, the rest is not filled.
    """

    def __init__(self, replay: ReplayBuffer, length: int, over: Callable[[Any], Tensor], replace: bool = False):
        super().__init__(replay, length)
        self.over, self.replace = over, replace
        shape, device = (replay.steps, replay.rows), replay.device
        self.lasted = torch.zeros(shape, dtype=torch.long, device=device)  # [C, B] of the episode that ends there; else 0
        self.clock = torch.zeros(replay.rows, dtype=torch.long, device=device)  # steps of the one under way

    def wrote(self, steps: int) -> None:
        r = self.replay
        slots = r.slots(r.count - steps + torch.arange(steps, device=r.device))
        over = self.over(r.transitions.take(slots[:, None] * r.rows + torch.arange(r.rows, device=r.device)))  # [T, B]
        at = torch.arange(1, steps + 1, device=r.device)[:, None]
        begun = torch.where(over, at, -self.clock).cummax(0).values  # where what follows began, at this rollout's count
        before = torch.cat((-self.clock[None], begun[:-1]))
        self.lasted.index_copy_(0, slots, (at - before) * over)
        self.clock.copy_(steps - begun[-1])

    def draws(self, count: int) -> int:
        return count if self.replace else self.lasted.numel()

    def candidates(self) -> Tensor:
        """[C, B] the slots at which an episode ends that is in the ring from its first step on."""
        r = self.replay
        slots = torch.arange(r.steps, device=r.device)
        step = r.count - 1 - (r.count - 1 - slots).remainder(r.steps)  # the last one that was written there
        first = step[:, None] - self.lasted + 1
        return (self.lasted > 0) & (first >= r.oldest)

    def draw(self, noise: Tensor, count: int) -> Sample:
        r, there = self.replay, self.candidates().flatten()
        if self.replace:
            ends = there.long().cumsum(0)
            place = torch.searchsorted(ends, (noise * ends[-1]).long() + 1).clamp(max=len(ends) - 1)
            there = there[place]
        else:
            place = torch.where(there, noise, -1.0).topk(min(count, len(there))).indices
            place = place.repeat(-(-count // len(place)))[:count]
            there = there[place] & (torch.arange(count, device=r.device) < self.lasted.numel())
        length = self.lasted.flatten()[place] * there
        filled = torch.arange(self.length, device=r.device)[:, None] < length
        return Sample(r.slots(place // r.rows - length + 1), place % r.rows, filled=filled)

    def state_dict(self) -> dict[str, Tensor]:
        return {"lasted": self.lasted.clone(), "clock": self.clock.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.lasted.copy_(state["lasted"])
        self.clock.copy_(state["clock"])
