"""N agents know which of N landmarks is the goal; an adversary that does not has to guess it from where they go.

The good are all paid how much nearer to the goal their nearest is than the adversary; the adversary is paid minus its own
distance. So the good spread out over all landmarks. This is `mpe2`'s simple_adversary_v3. Under `rules = openai` the
adversary is paid minus its squared distance. Nobody collides; positions are all that is seen, not velocities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import State
from shoal.envs.drawing import Color
from shoal.envs.mpe.bodies import BLUE, RED, Body, at_least
from shoal.envs.mpe.geometry import nearest
from shoal.envs.mpe.world import Parts, Scenario, length


class SimpleAdversary(Scenario):
    @dataclass(frozen=True)
    class Config(Scenario.Config):
        n: int = 2  # good agents, and landmarks
        agent_neighbors: int | None = None  # see so many of the nearest agents; none: all
        landmark_neighbors: int | None = None  # see so many of the nearest landmarks, and the goal; none: all

        def __post_init__(self) -> None:
            at_least(self, 1, "n", "agent_neighbors", "landmark_neighbors")

    goals = 1
    common = True
    stats_over = {"distance": "mean", "adversary_distance": "mean"}

    def cast(self) -> tuple[list[Body], list[Body]]:
        good = [Body(f"agent_{i}", size=0.15, collides=False, color=BLUE) for i in range(self.config.n)]
        marks = [Body(f"landmark_{i}", size=0.08, collides=False, color=(0.15,) * 3) for i in range(self.config.n)]
        return [Body("adversary_0", size=0.15, collides=False, color=RED), *good], marks

    def sees(self, w: State) -> dict[str, Parts]:
        c, us = self.config, self.everyone
        marks, others = self.gaps(w, us, self.marks), self.gaps(w, us, self.others(us))
        if c.landmark_neighbors is not None:
            (marks,) = nearest(marks, c.landmark_neighbors)
        if c.agent_neighbors is not None:
            (others,) = nearest(others, c.agent_neighbors)
        goal = self.aims(w) - self.places(w, us[1:])
        return {
            "adversary": [("landmark", marks[:, :1]), ("agent", others[:, :1])],
            "agent": [("goal", goal), ("landmark", marks[:, 1:]), ("agent", others[:, 1:])],
        }

    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        distance = length(self.places(w, self.everyone) - self.aims(w))  # [B, agents]
        foe, good = distance[:, :1], distance[:, 1:].amin(-1, keepdim=True)
        loss = foe.square() if self.config.rules == "openai" else foe
        reward = torch.cat((-loss, (foe - good).expand(-1, self.config.n)), 1)
        return reward, {"distance": good[:, 0], "adversary_distance": foe[:, 0]}

    def colors(self, w: State, row: int) -> dict[int, Color]:
        return {len(self.agents) + int(w["goal"][row, 0]): (0.15, 0.65, 0.15)}
