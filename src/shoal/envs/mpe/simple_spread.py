"""N agents cover N landmarks without bumping into each other.

Each agent is paid `local_ratio` of its own collisions (-1 each) and the rest of the team's distance (minus the sum over
landmarks of the nearest agent's distance). This is `mpe2`'s simple_spread_v3. Under `rules = openai` every agent is paid
the sum over agents, distance and collisions in full, itself counted among those it collides with.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.envs.base import State
from shoal.envs.mpe.bodies import BLUE, Body, at_least
from shoal.envs.mpe.geometry import nearest
from shoal.envs.mpe.world import Parts, Scenario
from shoal.spec import UserError

CAPTURE = 0.1  # a landmark with an agent this near is occupied


class SimpleSpread(Scenario):
    @dataclass(frozen=True)
    class Config(Scenario.Config):
        n: int = 3  # agents, and landmarks
        local_ratio: float = 0.5  # share of the pay that is the agent's own collisions
        terminate_on_success: bool = False  # end the episode when every landmark is occupied
        agent_neighbors: int | None = None  # see so many of the nearest agents; none: all
        landmark_neighbors: int | None = None  # see so many of the nearest landmarks; none: all
        curriculum: bool = False  # collisions cost nothing until a hook sets the world's stage to 1

        def __post_init__(self) -> None:
            at_least(self, 1, "n", "agent_neighbors", "landmark_neighbors")
            if not 0 <= self.local_ratio <= 1:
                raise UserError(f"--env.local-ratio is {self.local_ratio}: a share is between 0 and 1.")

    words = 2
    stats_over = {"occupied": "last", "collisions": "sum", "distance": "mean", "success": "last"}

    @property
    def common(self) -> bool:  # type: ignore[override]
        return self.config.rules == "openai" or self.config.local_ratio == 0

    def cast(self) -> tuple[list[Body], list[Body]]:
        n = self.config.n
        agents = [Body(f"agent_{i}", size=0.15, color=BLUE) for i in range(n)]
        return agents, [Body(f"landmark_{i}", collides=False) for i in range(n)]

    def sees(self, w: State) -> dict[str, Parts]:
        c, us = self.config, self.everyone
        marks = self.gaps(w, us, self.marks)
        others = self.gaps(w, us, self.others(us))
        heard = self.silence[:, :, None].expand(-1, -1, len(us) - 1, -1)  # nobody talks here; the reference has the zeros
        if c.landmark_neighbors is not None:
            (marks,) = nearest(marks, c.landmark_neighbors)
        if c.agent_neighbors is not None:
            others, heard = nearest(others, c.agent_neighbors, heard)
        own: Parts = [("self", self.velocities(w, us)), ("self", self.places(w, us))]
        return {"agent": [*own, ("landmark", marks), ("agent", others), ("agent", heard)]}

    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        distance = self.distances(w, self.marks, self.everyone).amin(-1)  # [B, landmarks] to the nearest agent
        apart = distance.sum(-1, keepdim=True)  # [B, 1]
        bumps = (self.contacts(w, self.everyone, self.everyone).sum(-1) - 1).to(self.dtype)  # [B, N] less itself
        cost = bumps + 1 if c.rules == "openai" else bumps
        cost = cost * (self.stage > 0) if c.curriculum else cost
        if c.rules == "openai":
            reward = -(apart + cost).sum(-1, keepdim=True).expand_as(bumps)
        else:
            reward = -apart * (1 - c.local_ratio) - cost * c.local_ratio
        occupied = (distance < CAPTURE).sum(-1)
        stats = {
            "occupied": occupied.to(self.dtype),
            "collisions": bumps.sum(-1) / 2,  # pairs
            "distance": distance.mean(-1),
            "success": (occupied == c.n).to(self.dtype),
        }
        return reward, stats
