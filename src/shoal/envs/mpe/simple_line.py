"""N agents stand evenly on the line between two landmarks, one on each landmark.

Agents are matched to the N spots so that the distances are least in sum, and all are paid minus the mean distance, each
cut off at 2. Success: everybody within 0.05 of its spot. The landmarks are 1.25 apart: one near the middle, the other in
a random direction, which is turned by 5 degrees until it lies inside the world. This is `mpe2`'s simple_line_v1, which
OpenAI did not have. The matching is exact, by trying all: N is 6 at most.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.envs.base import State
from shoal.envs.mpe.bodies import BLUE, Body
from shoal.envs.mpe.matching import Matching
from shoal.envs.mpe.world import length

LENGTH = 1.25


class SimpleLine(Matching):
    def cast(self) -> tuple[list[Body], list[Body]]:
        agents = [Body(f"agent_{i}", size=0.03, color=BLUE) for i in range(self.config.n)]
        return agents, [Body(f"landmark_{i}", size=0.02, collides=False, within=0.25) for i in range(2)]

    def setup(self) -> None:
        n = self.config.n
        self.shares = self.tensor([i / max(n - 1, 1) for i in range(n)])[:, None]  # [N, 1] how far along the line
        self.turns = self.tensor([math.radians(5) * i for i in range(72)])  # all the way round: one of them is inside
        self.noise_begin = 2 * (n + 1) + 1
        super().setup()

    def place(self, noise: Tensor) -> State:
        free = self.scatter(noise[:, :-1], self.within[:-1])  # agents and the first landmark
        turn = noise[:, -1:] * 2 * math.pi + self.turns  # [B, 72]
        ends = free[:, -1:] + torch.stack((turn.cos(), turn.sin()), -1) * LENGTH
        first = (ends.abs() < 1).all(-1).to(torch.uint8).argmax(-1)  # [B] argmax: the first of equals
        end = ends.gather(1, first[:, None, None].expand(-1, 1, 2))
        return {"pos": torch.cat((free, end), 1)}

    def distances_to_spots(self, w: State) -> Tensor:
        near, far = self.places(w, self.marks).split(1, 1)  # [B, 1, 2] each
        spots = near + (far - near) * self.shares  # [B, N, 2]
        return length(self.places(w, self.everyone)[:, :, None] - spots[:, None])
