"""Two agents, three coloured landmarks: each knows where the other should go, and has to tell it in one of ten words.

Both move and talk. An agent's own pay is minus the distance of the *other* to the landmark it knows of; it is paid
`local_ratio` of that and the rest of the mean of both. This is `mpe2`'s simple_reference_v3. Under `rules = openai` each
is paid the sum of both squared distances, negative.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.envs.base import State
from shoal.envs.drawing import Color
from shoal.envs.mpe.bodies import Body
from shoal.envs.mpe.world import Parts, Scenario, length
from shoal.spec import UserError

MARKS = ((0.75, 0.25, 0.25), (0.25, 0.75, 0.25), (0.25, 0.25, 0.75))  # colours of the landmarks


class SimpleReference(Scenario):
    @dataclass(frozen=True)
    class Config(Scenario.Config):
        local_ratio: float = 0.5  # share of the pay that is for the other agent's distance alone

        def __post_init__(self) -> None:
            if not 0 <= self.local_ratio <= 1:
                raise UserError(f"--env.local-ratio is {self.local_ratio}: a share is between 0 and 1.")

    words = 10
    goals = 2  # where agent 1 should go, which agent 0 knows; and the other way round
    stats_over = {"distance": "mean"}

    @property
    def common(self) -> bool:  # type: ignore[override]
        return self.config.rules == "openai" or self.config.local_ratio == 0

    def cast(self) -> tuple[list[Body], list[Body]]:
        agents = [Body(f"agent_{i}", collides=False, silent=False) for i in range(2)]
        return agents, [Body(f"landmark_{i}", collides=False, color=c) for i, c in enumerate(MARKS)]

    def setup(self) -> None:
        self.shades = self.tensor(MARKS)
        super().setup()

    def sees(self, w: State) -> dict[str, Parts]:
        us = self.everyone
        marks, heard = self.gaps(w, us, self.marks), w["comm"].flip(1)
        return {"agent": [("self", w["vel"]), ("landmark", marks), ("goal", self.shades[w["goal"]]), ("message", heard)]}

    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        distance = length(self.places(w, self.everyone).flip(1) - self.aims(w))  # [B, 2] of the other one
        mean = distance.mean(-1, keepdim=True)
        if self.config.rules == "openai":
            reward = -distance.square().sum(-1, keepdim=True).expand(-1, 2)
        else:
            reward = -mean * (1 - self.config.local_ratio) - distance * self.config.local_ratio
        return reward, {"distance": mean[:, 0]}

    def colors(self, w: State, row: int) -> dict[int, Color]:
        first, second = w["goal"][row].tolist()
        return {1: MARKS[first], 0: MARKS[second]}  # each looks like the landmark it should find
