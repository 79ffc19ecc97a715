"""N agents stand evenly on a circle of radius 0.5 round a landmark.

The N spots begin at the angle of the agent whose angle is smallest. Agents are matched to spots so that the distances are
least in sum, and all are paid minus the mean distance, each cut off at 2. Success: everybody within 0.05 of its spot.
This is `mpe2`'s simple_formation_v1, which OpenAI did not have. The matching is exact, by trying all: N is 6 at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import State
from shoal.envs.mpe.world import BLUE, MOST_MATCHED, Body, Parts, Scenario, at_least, length, matched, matchings
from shoal.spec import UserError

RADIUS = 0.5
NEAR = 0.05


class SimpleFormation(Scenario):
    @dataclass(frozen=True)
    class Config(Scenario.Config):
        n: int = 4  # agents, 6 at most
        terminate_on_success: bool = False  # end the episode when everybody is in place

        def __post_init__(self) -> None:
            at_least(self, 1, "n")
            if self.n > MOST_MATCHED:
                raise UserError(f"--env.n is {self.n}: agents are matched to spots by trying all ways, up to {MOST_MATCHED}.")

    openai = False
    common = True
    stats_over = {"distance": "mean", "success": "last"}

    def cast(self) -> tuple[list[Body], list[Body]]:
        agents = [Body(f"agent_{i}", color=BLUE) for i in range(self.config.n)]
        return agents, [Body("landmark_0", size=0.03, collides=False, within=0.5)]

    def setup(self) -> None:
        n = self.config.n
        self.turns = self.tensor([2 * math.pi * i / n for i in range(n)])
        self.ways = self.index(matchings(n))
        super().setup()

    def sees(self, w: State) -> dict[str, Parts]:
        us = self.everyone
        return {"agent": [("self", w["vel"]), ("self", self.places(w, us)), ("landmark", self.gaps(w, us, self.marks))]}

    def judge(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        arms = -self.gaps(w, self.everyone, self.marks)  # [B, N, 1, 2] from the landmark
        angle = torch.atan2(arms[..., 1], arms[..., 0])
        first = torch.where(angle < 0, angle + 2 * math.pi, angle).amin(1)  # [B, 1]
        turn = first + self.turns  # [B, N]
        spots = torch.stack((turn.cos(), turn.sin()), -1) * RADIUS
        apart = matched(length(arms - spots[:, None]), self.ways)  # [B, N]
        reward = -apart.clamp(max=2).mean(-1, keepdim=True).expand_as(apart)
        return reward, {"distance": apart.mean(-1), "success": (apart < NEAR).all(-1).to(self.dtype)}
