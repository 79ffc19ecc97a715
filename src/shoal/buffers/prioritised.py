"""Drawing from a replay by priority."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.buffers.replay import ReplayBuffer, Sample, Uniform


class Prioritised(Uniform):
    """Windows in proportion to priority ** alpha (Schaul et al., 2016, https://arxiv.org/abs/1511.05952), one from each of K
    equal shares of the whole, with weights (n P) ** -beta over the largest of the batch. What is new has the highest priority
    seen so far.

    Sums are kept by blocks, and recomputed wherever a priority changes: nothing drifts, and a draw looks at the blocks and
    into one of them.
    """

    def __init__(self, replay: ReplayBuffer, length: int, alpha: float, floor: float = 1e-6):
        super().__init__(replay, length)
        self.alpha, self.floor = alpha, floor
        n = replay.steps * replay.rows
        self.block = 1 << max(4, (n.bit_length() + 1) // 2)
        device = replay.device
        self.mass = torch.zeros(-(-n // self.block), self.block, device=device)  # priority ** alpha, [blocks, block]
        self.sums = torch.zeros(len(self.mass), dtype=torch.float64, device=device)
        self.top = torch.ones((), device=device)
        self.beta = torch.ones((), device=device)  # its owner sets it

    def wrote(self, steps: int) -> None:
        """A window is known when its last step is: those that just became whole are new, and what was overwritten is gone."""
        r, device = self.replay, self.replay.device
        rows, tail = torch.arange(r.rows, device=device), self.length - 1
        began = r.count - steps - tail + torch.arange(steps + tail, device=device)  # the windows that changed, by first step
        whole = (began >= 0) & (began + tail < r.count) & (began >= r.oldest)
        places = (r.slots(began)[:, None] * r.rows + rows).flatten()
        mass = (self.top**self.alpha).where(whole, 0)[:, None].expand(-1, r.rows).flatten()
        self._set(places, mass)

    def draw(self, noise: Tensor, count: int) -> Sample:
        r = self.replay
        ends = self.sums.cumsum(0)
        total = ends[-1]
        aim = (torch.arange(count, device=noise.device) + noise) / count * total
        aim = torch.minimum(aim, total * (1 - 1e-12))  # never past the end by rounding
        block = torch.searchsorted(ends, aim, right=True).clamp(max=len(ends) - 1)
        inside = self.mass[block].double().cumsum(-1)  # [K, block]
        rest = torch.minimum(aim - (ends[block] - self.sums[block]), inside[:, -1] * (1 - 1e-12)).clamp(min=0)
        within = torch.searchsorted(inside, rest[:, None], right=True)[:, 0].clamp(max=self.block - 1)
        place = block * self.block + within
        chance = self.mass[block, within].double() / total
        known = (r.count.clamp(max=r.steps) - self.length + 1) * r.rows
        weight = (known * chance).pow(-self.beta.double())
        return Sample(place // r.rows, place % r.rows, (weight / weight.amax()).float())

    def learnt(self, sample: Sample, priority: Tensor | None) -> None:
        assert priority is not None, "who draws by priority says what was learnt"
        priority = priority.detach() + self.floor
        self._set(sample.slot * self.replay.rows + sample.row, priority**self.alpha)
        self.top.copy_(torch.maximum(self.top, priority.amax()))

    def _set(self, places: Tensor, mass: Tensor) -> None:
        self.mass.view(-1).index_copy_(0, places, mass)
        if len(places) < len(self.mass):
            blocks = places // self.block
            self.sums.index_copy_(0, blocks, self.mass[blocks].sum(-1, dtype=torch.float64))
        else:
            self.sums.copy_(self.mass.sum(-1, dtype=torch.float64))

    def state_dict(self) -> dict[str, Tensor]:
        return {"mass": self.mass.clone(), "sums": self.sums.clone(), "top": self.top.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for k in ("mass", "sums", "top"):
            getattr(self, k).copy_(state[k])
