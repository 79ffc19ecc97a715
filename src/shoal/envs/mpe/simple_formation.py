"""N agents stand evenly on a circle of radius 0.5 round a landmark.

The N spots begin at the angle of the agent whose angle is smallest. Agents are matched to spots so that the distances are
least in sum, and all are paid minus the mean distance, each cut off at 2. Success: everybody within 0.05 of its spot.
This is `mpe2`'s simple_formation_v1, which OpenAI did not have. The matching is exact, by trying all: N is 6 at most.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.envs.base import State
from shoal.envs.mpe.bodies import BLUE, Body
from shoal.envs.mpe.matching import Matching
from shoal.envs.mpe.world import length

RADIUS = 0.5


class SimpleFormation(Matching):
    def cast(self) -> tuple[list[Body], list[Body]]:
        agents = [Body(f"agent_{i}", color=BLUE) for i in range(self.config.n)]
        return agents, [Body("landmark_0", size=0.03, collides=False, within=0.5)]

    def setup(self) -> None:
        n = self.config.n
        self.turns = self.tensor([2 * math.pi * i / n for i in range(n)])
        super().setup()

    def distances_to_spots(self, w: State) -> Tensor:
        arms = -self.gaps(w, self.everyone, self.marks)  # [B, N, 1, 2] from the landmark
        angle = torch.atan2(arms[..., 1], arms[..., 0])
        first = torch.where(angle < 0, angle + 2 * math.pi, angle).amin(1)  # [B, 1]
        turn = first + self.turns  # [B, N]
        spots = torch.stack((turn.cos(), turn.sin()), -1) * RADIUS
        return length(arms - spots[:, None])
