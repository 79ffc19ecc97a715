"""What scenarios share in which N agents are matched to N spots: the matching of least total distance, by trying all ways.

All are paid minus the mean distance to their spots, each cut off at 2. Success: everybody within 0.05 of its spot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import permutations

from torch import Tensor

from shoal.envs.base import State
from shoal.envs.mpe.bodies import at_least
from shoal.envs.mpe.world import Parts, Scenario
from shoal.spec import UserError

MOST = 6  # agents: 720 ways
NEAR = 0.05


class Matching(Scenario, ABC):
    @dataclass(frozen=True)
    class Config(Scenario.Config):
        n: int = 4  # agents, 6 at most
        terminate_on_success: bool = False  # end the episode when everybody is in place

        def __post_init__(self) -> None:
            at_least(self, 1, "n")
            if self.n > MOST:
                raise UserError(f"--env.n is {self.n}: agents are matched to spots by trying all ways, up to {MOST}.")

    openai = False
    common = True
    stats_over = {"distance": "mean", "success": "last"}

    @abstractmethod
    def distances_to_spots(self, w: State) -> Tensor:
        """[B, N, N] from every agent to every spot."""

    def setup(self) -> None:
        self.ways = self.index(matchings(self.config.n))
        super().setup()

    def sees(self, w: State) -> dict[str, Parts]:
        us = self.everyone
        return {"agent": [("self", w["vel"]), ("self", self.places(w, us)), ("landmark", self.gaps(w, us, self.marks))]}

    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        apart = matched(self.distances_to_spots(w), self.ways)  # [B, N]
        reward = -apart.clamp(max=2).mean(-1, keepdim=True).expand_as(apart)
        return reward, {"distance": apart.mean(-1), "success": (apart < NEAR).all(-1).to(self.dtype)}


def matchings(n: int) -> list[int]:
    """All ways to give n agents a spot each, as indices into a flat [n * n] table, agent after agent: n! * n numbers."""
    return [agent * n + spot for order in permutations(range(n)) for agent, spot in enumerate(order)]


def matched(distance: Tensor, ways: Tensor) -> Tensor:
    """Each agent's distance [B, n] to its spot, in the matching of least total; distance [B, n, n], ways: `matchings(n)`."""
    n = distance.shape[1]
    tried = distance.flatten(1).index_select(1, ways).unflatten(1, (-1, n))  # [B, n!, n]
    best = tried.sum(-1).argmin(-1)[:, None, None]
    return tried.gather(1, best.expand(-1, 1, n))[:, 0]
