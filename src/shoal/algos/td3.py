"""TD3 and MATD3 (Fujimoto et al., 2018, https://arxiv.org/abs/1802.09477): DDPG that overestimates less.

    y = r + gamma (1 - terminated) min_k Q'_k(x', clip(mu'(o') + clip(e, -c, c), -1, 1)),    e ~ N(0, sigma)

Two critics, of which the lower one is believed (`critics`); next actions with noise, so that a critic's sharp peaks are not
climbed (`smooth` is sigma, `smooth_limit` c; discrete ones have none); an actor, and targets, that move once in `delay`
updates, when the critics have come to rest. What other groups do next, in a critic of the world, has no noise. All else is
`algos/ddpg.py`: kinds of actions, knobs and departures.
`td3` (`itd3` of teams) has critics of its own observation and action, `matd3` (`--algo.critic world`) of everybody's.

Metrics, for each group: those of `algos/ddpg.py`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.algos.checks import bounded
from shoal.algos.ddpg import DDPG
from shoal.ops.explore import perturbed
from shoal.spec import Box


class TD3(DDPG):
    names = {"itd3": {}, "matd3": {"critic": "world"}}

    @dataclass(frozen=True)
    class Config(DDPG.Config):
        critics: int = 2  # of which the lowest counts as the next value
        delay: int = 2  # updates of the critics for each of the actor and of the targets
        smooth: float = 0.2  # continuous actions: deviation of the noise in next actions
        smooth_limit: float = 0.5  # and what it is held within

        def __post_init__(self) -> None:
            super().__post_init__()
            bounded(self, {"smooth": (0, 1e30), "smooth_limit": (0, 1e30)})

    def next_action(self, params: Tensor, legal: Tensor | None, noise: Tensor) -> tuple[Tensor, Any]:
        action, policy = super().next_action(params, legal, noise)
        if isinstance(self.space, Box):
            action = perturbed(action, noise, self.config.smooth, self.config.smooth_limit)
        return action, policy
