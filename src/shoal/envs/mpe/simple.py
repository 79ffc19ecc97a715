"""One agent goes to one landmark, and is paid minus the squared distance to it. `mpe2`'s simple_v3; OpenAI paid the same.

The smallest world there is here: no team, no talk, nobody in the way. Good for finding out whether an algorithm learns.
"""

from __future__ import annotations

from torch import Tensor

from shoal.envs.base import State
from shoal.envs.mpe.bodies import Body
from shoal.envs.mpe.world import Parts, Scenario


class Simple(Scenario):
    common = True
    stats_over = {"distance": "mean"}

    def cast(self) -> tuple[list[Body], list[Body]]:
        return [Body("agent_0", collides=False)], [Body("landmark_0", collides=False, color=(0.75, 0.25, 0.25))]

    def sees(self, w: State) -> dict[str, Parts]:
        us = self.everyone
        return {"agent": [("self", self.velocities(w, us)), ("landmark", self.gaps(w, us, self.marks))]}

    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        distance = self.distances(w, self.everyone, self.marks)[:, :, 0]  # [B, 1]
        return -distance.square(), {"distance": distance[:, 0]}
