"""Slow predators hunt faster prey among obstacles.

Every touch of a predator (`adversary`) and a prey (`agent`) pays all predators 10 and costs that prey 10; prey also pay for
leaving the world, so that they cannot run away for ever. This is `mpe2`'s simple_tag_v3; OpenAI paid the same.

With `curriculum` the prey's speed and push are 0.5, 0.75 or 1 times the full ones, by the world's `stage` (0, 1, 2), which
a hook sets; a row keeps the factor that its episode began with. With `terminate_on_success` an episode ends when every
prey is touched at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import State
from shoal.envs.mpe.bodies import GREEN, RED, Body, at_least
from shoal.envs.mpe.geometry import fence, nearest
from shoal.envs.mpe.world import Parts, Scenario, pick

PACES = (0.5, 0.75, 1.0)  # of the prey, by stage


class SimpleTag(Scenario):
    @dataclass(frozen=True)
    class Config(Scenario.Config):
        num_good: int = 1  # prey
        num_adversaries: int = 3  # predators
        num_obstacles: int = 2  # round things in the way
        curriculum: bool = False  # slow the prey down until a hook has set the world's stage to 2
        terminate_on_success: bool = False  # end the episode when every prey is touched at once
        agent_neighbors: int | None = None  # see so many of the nearest agents; none: all
        landmark_neighbors: int | None = None  # see so many of the nearest obstacles; none: all

        def __post_init__(self) -> None:
            at_least(self, 1, "num_good", "num_adversaries", "agent_neighbors", "landmark_neighbors")
            at_least(self, 0, "num_obstacles")

    stats_over = {"touches": "sum", "success": "last"}

    @property
    def common(self) -> bool:  # type: ignore[override]
        return self.config.num_good == 1  # predators are paid alike, prey each for itself

    def cast(self) -> tuple[list[Body], list[Body]]:
        c = self.config
        foes = [Body(f"adversary_{i}", size=0.075, accel=3.0, max_speed=1.0, color=RED) for i in range(c.num_adversaries)]
        prey = [Body(f"agent_{i}", size=0.05, accel=4.0, max_speed=1.3, color=GREEN) for i in range(c.num_good)]
        return foes + prey, [Body(f"landmark_{i}", size=0.2, within=0.9) for i in range(c.num_obstacles)]

    def setup(self) -> None:
        self.paces = self.tensor(PACES)
        c = self.config
        self.is_prey = self.tensor([0.0] * c.num_adversaries + [1.0] * c.num_good)[:, None]  # [agents, 1]
        super().setup()
        self.foes, self.prey = self.stems["adversary"], self.stems["agent"]

    def place(self, noise: Tensor) -> State:
        state = super().place(noise)
        if self.config.curriculum:
            # an index for each row: indexing with a single number would fetch it from the device
            state["pace"] = self.paces[self.stage.clamp(0, len(PACES) - 1).expand(self.rows)]
        return state

    def thrust(self, state: State) -> Tensor:
        return self.accel * self._pace(state) if self.config.curriculum else self.accel

    def speed_limit(self, state: State) -> Tensor | None:
        limit = self.max_speed
        return limit * self._pace(state) if limit is not None and self.config.curriculum else limit

    def _pace(self, state: State) -> Tensor:
        return 1 + self.is_prey * (state["pace"][:, None, None] - 1)  # [B, agents, 1]

    def sees(self, w: State) -> dict[str, Parts]:
        c, us = self.config, self.everyone
        k, order = c.num_adversaries, self.others(us)
        marks, others = self.gaps(w, us, self.marks), self.gaps(w, us, order)
        if c.landmark_neighbors is not None:
            (marks,) = nearest(marks, c.landmark_neighbors)
        if c.agent_neighbors is not None:
            others, speeds = nearest(others, c.agent_neighbors, pick(w["vel"] * self.is_prey, order))
            fast, slow = speeds[:, :k], speeds[:, k:]
        else:  # the velocities of prey alone; they stand last among the others
            speeds = pick(w["vel"], order)
            fast, slow = speeds[:, :k, k - 1 :], speeds[:, k:, k:]
        pos = self.places(w, us)
        blocks: Parts = [("self", w["vel"]), ("self", pos), ("landmark", marks), ("agent", others)]
        return {
            "adversary": [*((name, x[:, :k]) for name, x in blocks), ("prey", fast)],
            "agent": [*((name, x[:, k:]) for name, x in blocks), ("prey", slow)],
        }

    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        caught = self.contacts(w, self.foes, self.prey).sum(1).to(self.dtype)  # [B, prey] by how many
        touches = caught.sum(-1)
        hunt = touches[:, None].expand(-1, c.num_adversaries) * 10
        reward = torch.cat((hunt, caught * -10 - fence(self.places(w, self.prey))), 1)
        return reward, {"touches": touches, "success": (caught > 0).all(-1).to(self.dtype)}
