"""Predators with a leader that talks hunt prey that eat; forests hide whoever is in them.

Like simple_tag, and: prey are paid 2 for touching food and lose 0.05 of the distance to the nearest; a predator loses 0.1
of its distance to the nearest prey; a touch is worth 5. Those in a forest are seen only by those in the same one, and see
nobody else; the leader (`leadadversary`) sees everybody, and all predators hear its word, one of four. This is `mpe2`'s
simple_world_comm_v3. Under `rules = openai` the distance to food is paid, not charged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import State
from shoal.envs.mpe.bodies import Body, at_least
from shoal.envs.mpe.geometry import fence
from shoal.envs.mpe.world import Parts, Scenario, pick


class SimpleWorldComm(Scenario):
    @dataclass(frozen=True)
    class Config(Scenario.Config):
        num_good: int = 2  # prey
        num_adversaries: int = 4  # predators, the leader among them
        num_obstacles: int = 1  # round things in the way
        num_food: int = 2  # pieces of food
        num_forests: int = 2  # places to hide

        def __post_init__(self) -> None:
            at_least(self, 1, "num_good", "num_adversaries", "num_food")
            at_least(self, 0, "num_obstacles", "num_forests")

    words = 4
    teams = {"leadadversary": "adversary", "adversary": "adversary", "agent": "agent"}
    stats_over = {"touches": "sum", "food": "sum", "hidden": "mean"}

    @property
    def common(self) -> bool:  # type: ignore[override]
        return self.config.num_good == self.config.num_adversaries == 1

    def cast(self) -> tuple[list[Body], list[Body]]:
        c = self.config
        names = ["leadadversary_0"] + [f"adversary_{i}" for i in range(c.num_adversaries - 1)]
        foes = [Body(x, 0.075, True, (0.95, 0.45, 0.45), accel=3.0, max_speed=1.0) for x in names]
        foes[0] = Body(names[0], 0.075, True, (0.65, 0.15, 0.15), accel=3.0, max_speed=1.0, silent=False)
        prey = [Body(f"agent_{i}", 0.045, True, (0.45, 0.95, 0.45), accel=4.0, max_speed=1.3) for i in range(c.num_good)]
        rocks = [Body(f"landmark_{i}", 0.2, within=0.9) for i in range(c.num_obstacles)]
        food = [Body(f"food_{i}", 0.03, False, (0.15, 0.15, 0.65), within=0.9) for i in range(c.num_food)]
        woods = [Body(f"forest_{i}", 0.3, False, (0.6, 0.9, 0.6), within=0.9) for i in range(c.num_forests)]
        return foes + prey, rocks + food + woods

    def setup(self) -> None:
        c = self.config
        agents = c.num_adversaries + c.num_good
        self.foes, self.prey = list(range(c.num_adversaries)), list(range(c.num_adversaries, agents))
        self.food = list(range(agents + c.num_obstacles, agents + c.num_obstacles + c.num_food))
        self.woods = list(range(self.food[-1] + 1, self.food[-1] + 1 + c.num_forests))
        self.leads = self.tensor([True] + [False] * (agents - 1), torch.bool)[:, None]  # [agents, 1]
        super().setup()

    def sees(self, w: State) -> dict[str, Parts]:
        us, k = self.everyone, len(self.foes)
        order = self.others(us)
        inside = self.contacts(w, us, self.woods)  # [B, agents, forests]
        outside = ~inside.any(-1)  # [B, agents]
        seen = (inside[:, :, None] & pick(inside, order)).any(-1) | (outside[:, :, None] & pick(outside, order)) | self.leads
        near = self.gaps(w, us, order) * seen[..., None]  # [B, agents, others, 2]
        speeds = pick(w["vel"], order) * seen[..., None]  # of prey alone: they stand last among the others
        hides = torch.where(inside, 1.0, -1.0).to(self.dtype)
        said = w["comm"][:, :1].expand(-1, k, -1)
        marks = self.gaps(w, us, self.marks)
        seen_by_all: Parts = [("self", w["vel"]), ("self", self.places(w, us)), ("landmark", marks), ("agent", near)]
        foes: Parts = [*((name, x[:, :k]) for name, x in seen_by_all), ("prey", speeds[:, :k, k - 1 :])]
        foes += [("forest", hides[:, :k]), ("message", said)]
        prey: Parts = [*((name, x[:, k:]) for name, x in seen_by_all), ("forest", hides[:, k:]), ("prey", speeds[:, k:, k:])]
        leader = [(name, x[:, :1]) for name, x in foes]
        return {"leadadversary": leader, "adversary": [(name, x[:, 1:]) for name, x in foes], "agent": prey}

    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        chase, meal = self.distances(w, self.foes, self.prey), self.distances(w, self.prey, self.food)
        caught = (chase < self.reach[0, self.prey[0]]).sum(1).to(self.dtype)  # [B, prey] by how many
        eaten = (meal < self.reach[self.prey[0], self.food[0]]).sum(-1).to(self.dtype)  # [B, prey]
        touches = caught.sum(-1)
        hunger = 0.05 if self.config.rules == "openai" else -0.05
        flee = caught * -5 - fence(self.places(w, self.prey)) * 2 + eaten * 2 + meal.amin(-1) * hunger
        hidden = self.contacts(w, self.prey, self.woods).any(-1).to(self.dtype).mean(-1)
        reward = torch.cat((touches[:, None] * 5 - chase.amin(-1) * 0.1, flee), 1)
        return reward, {"touches": touches, "food": eaten.sum(-1), "hidden": hidden}
