"""An agent wants to be at its goal, one of two landmarks; an adversary that does not know which pushes it away.

The agent is paid minus its distance to the goal; the adversary the agent's distance less its own. Each landmark has a
colour and the agent has its goal's: it sees them, the adversary does not. This is `mpe2`'s simple_push_v3; OpenAI paid
the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.envs.base import State
from shoal.envs.drawing import Color
from shoal.envs.mpe.bodies import Body
from shoal.envs.mpe.world import Parts, Scenario, length

MARKS = ((0.1, 0.9, 0.1), (0.1, 0.1, 0.9))  # colours of the landmarks
GOOD = ((0.25, 0.75, 0.25), (0.25, 0.25, 0.75))  # colours of the agent, by its goal


class SimplePush(Scenario):
    goals = 1
    common = True
    stats_over = {"distance": "mean", "adversary_distance": "mean", "collisions": "sum"}

    def cast(self) -> tuple[list[Body], list[Body]]:
        marks = [Body(f"landmark_{i}", collides=False, color=MARKS[i]) for i in range(2)]
        return [Body("adversary_0", color=(0.75, 0.25, 0.25)), Body("agent_0")], marks

    def setup(self) -> None:
        self.worn = self.tensor(GOOD)
        self.shown = self.tensor(MARKS).expand(self.rows, 1, 2, 3)
        super().setup()

    def sees(self, w: State) -> dict[str, Parts]:
        us, vel = self.everyone, w["vel"]
        marks, others = self.gaps(w, us, self.marks), self.gaps(w, us, self.others(us))
        mine: Parts = [("goal", self.aims(w) - self.places(w, us[1:])), ("self", self.worn[w["goal"]])]
        seen: Parts = [("landmark", marks[:, 1:]), ("landmark", self.shown), ("agent", others[:, 1:])]
        return {
            "adversary": [("self", vel[:, :1]), ("landmark", marks[:, :1]), ("agent", others[:, :1])],
            "agent": [("self", vel[:, 1:]), *mine, *seen],
        }

    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        foe, good = length(self.places(w, self.everyone) - self.aims(w)).unbind(1)
        bumps = self.contacts(w, self.everyone[:1], self.everyone[1:])[:, 0, 0].to(self.dtype)
        return torch.stack((good - foe, -good), 1), {"distance": good, "adversary_distance": foe, "collisions": bumps}

    def colors(self, w: State, row: int) -> dict[int, Color]:
        return {1: GOOD[int(w["goal"][row, 0])]}
