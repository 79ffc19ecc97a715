"""VDN (Sunehag et al., 2018, https://arxiv.org/abs/1706.05296): DDQN whose agents' values add up to the team's.

    Q_team(o, a) = sum_i Q_i(o_i, a_i),    learnt towards  r + gamma (1 - terminated) Q'_team(o', argmax)

so that the team's one error is divided among its agents, and each can act alone: what is best for all is best for each. One
instance plays all groups of its team, unlike ones too. The dead add nothing; the team ends when nobody goes on, and so do all
returns (`after_death` own is refused).

Agents of a team are paid alike: their mean reward, if need be (`--reward`). A sum cannot hold games in which an
agent's best choice depends on another's (climbing, penalty: see `envs/probe/probe_matrix.py`). Knobs and departures are those
of `algos/ddqn.py`; teams that move in turn are refused.

Metrics, for each group: those of `algos/ddqn.py`
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.algos.ddqn import DDQN
from shoal.spec import Frame


class VDN(DDQN):
    names = {}
    reward, turns, unit = "common", False, "team"

    def joint(self, q: Tensor, active: Tensor | None, frame: Frame, target: bool) -> Tensor:
        q = q if active is None else torch.where(active, q, 0)
        return q.sum(-1, keepdim=True)
