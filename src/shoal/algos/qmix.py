"""QMIX (Rashid et al., 2018, https://arxiv.org/abs/1803.11485): DDQN whose agents' values are mixed into their team's.

    Q_team(s, a) = f_s(Q_1(o_1, a_1), ..., Q_N(o_N, a_N)),    df_s / dQ_i >= 0

f_s is a net of one hidden layer whose weights other nets make of the state, never negative ones (`nets/mixer.py`): how much an
agent matters depends on the moment, yet what is best for each is best for the team. One instance plays all groups of its
team, unlike ones too. The dead count as zero; the team ends when nobody goes on, and so do all returns (`after_death` own is
refused).

The target must be slow, rewards of size one, and updates not too many. A mixer passes on more of its agents' errors where the
state makes it steep, and a maximum looks for them: on simple_spread, where every reward is negative, values ran away upwards
with targets copied every 200 updates or following by 0.01, whatever the batch, the rate and the loss: -22 after 1M steps.
Copied every 2000 updates they still crept up late in a run of 100,000 updates with rewards as they are: -10.9 at 550k steps,
-12.3 at the end (seed 3). With rewards divided by their root mean square it ends at -10.1 (seed 0), and with 40,000 updates of
batches of 512 as well, the defaults, at -9.5, -9.6 and -9.8 (seeds 0 to 2), each within 0.05 of its best. Rewards as they
are and batches of 512 alone: -12.1, with copies every 1000. Copies every 500, all else as the defaults: -18.6.

`mixer_width` is the width of the hidden layer, `hyper_width` that of the nets that make its weights. The state is the world's
own or else all observations, normalised as they are (but see `normalise_state`, `state_normaliser`). Agents of a team are paid
alike: their mean reward, if need be (`--reward`). Other knobs and departures are those of `algos/ddqn.py`; teams that move in
turn are refused.

Metrics, for each group: those of `algos/ddqn.py`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.algos import defaults
from shoal.algos.base import StateConfig
from shoal.algos.checks import bounded
from shoal.algos.ddqn import DDQN
from shoal.algos.observations import Observations, scope_width
from shoal.nets.mixer import MonotonicMixer
from shoal.spec import Batch, Frame, UserError


class QMIX(DDQN):
    names = {}
    reward, turns, unit = "common", False, "team"

    @dataclass(frozen=True)
    class Config(StateConfig, DDQN.Config):
        rules: ClassVar[defaults.Rules] = {**DDQN.Config.rules, "every": defaults.seldom}

        every: float | None = None  # environment steps for each update, as above; none: 40k updates a run, from 1 to 25
        batch: int = 512  # sequences (without memory: single transitions) an update
        normalise_reward: bool = True  # rewards divided by their running root mean square
        target_every: int = 2000  # updates between those of the target; often, and values run away
        target_tau: float = 1.0  # share by which it follows; 1: copied
        grad_clip: float | None = 10.0  # norm beyond which gradients are scaled down; none: never
        mixer_width: int = 32  # units that agents' values are mixed in
        hyper_width: int = 64  # units of the nets that make the mixer's weights

        def __post_init__(self) -> None:
            super().__post_init__()
            bounded(self, {}, ("mixer_width", "hyper_width"))

    def make_mixer(self, generator: torch.Generator) -> nn.Module:
        c, net = self.config, replace(self.net, attention="none")
        self.state_observations = Observations(self, "world", groups=(self.groups[0],), net=net, zero_dead=False)
        if self.state_observations.joins:
            raise UserError("QMIX mixes by a state of numbers, and this world has pictures and no state of its own: take vdn.")
        width = scope_width(self.spec, self.groups, "world")
        return MonotonicMixer(width, self.n, c.mixer_width, c.hyper_width, generator)

    def joint(self, q: Tensor, active: Tensor | None, frame: Frame, target: bool) -> Tensor:
        q = q if active is None else torch.where(active, q, 0)
        nets: Any = self.target.module if target else {"mixer": self.mixer}
        return nets["mixer"](q, self.state_observations.critic_input(frame))

    def update_statistics(self, batch: Batch) -> None:
        super().update_statistics(batch)
        self.state_observations.update(batch.frame)
