"""What learners are paid: their own reward or their team's, the world's shaping, and what the user's own shaper makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.spec import Batch, EnvSpec, Frame, UserError
from shoal.training.shapers import Shaper
from shoal.tree import tree_map


class Shaping:
    """`shaping(batch)` sets `batch.learner_reward`, on the device. Reported returns stay raw."""

    def __init__(self, spec: EnvSpec, reward: str, shapers: dict[str, Shaper], now: Tensor, steps: int):
        self.spec, self.reward, self.shapers, self.now, self.steps = spec, reward, shapers, now, steps
        self.team_of = {g.name: [x.name for x in groups] for groups in spec.teams.values() for g in groups}
        self.not_finite = torch.zeros((), dtype=torch.bool, device=now.device)  # a shaper gave what is not finite

    def __call__(self, batch: Batch) -> None:
        for g, result in batch.results.items():
            reward = result.reward if self.reward == "own" else self._team_reward(batch, g)
            reward = reward if result.shaping is None else reward + result.shaping
            if g in self.shapers:
                reward = self._shaped(g, reward, batch.frame[g].obs)
                self.not_finite |= ~reward.isfinite().all()
            batch.learner_reward[g] = reward

    def _team_reward(self, batch: Batch, group: str) -> Tensor:
        team = torch.cat([batch.results[g].reward for g in self.team_of[group]], -1)  # [T, B, all its agents]
        total = team.sum(-1, keepdim=True) / (team.shape[-1] if self.reward == "team-mean" else 1)
        return total.expand_as(batch.results[group].reward)

    def _shaped(self, group: str, reward: Tensor, obs: Any) -> Tensor:
        shaper = self.shapers[group]
        shaped = shaper(reward.clone(), tree_map(torch.clone, obs), self.now, self.steps)  # they are the batch's own
        if not isinstance(shaped, Tensor) or shaped.shape != reward.shape:
            gave = list(shaped.shape) if isinstance(shaped, Tensor) else type(shaped).__name__
            raise UserError(f"the shaper of {group!r} gave {gave} for rewards of {list(reward.shape)}: it must give as many.")
        return shaped

    def try_out(self, frame: Frame, rows: int) -> None:
        """Call every shaper once, with rewards of zero, before a folder is made."""
        for g in self.shapers:
            obs = tree_map(lambda x: x[None], frame[g].obs)
            try:
                self._shaped(g, torch.zeros(1, rows, self.spec[g].n, device=self.now.device), obs)
            except UserError:
                raise
            except Exception as e:  # whatever the user's function does
                raise UserError(f"the shaper of {g!r} failed on (reward, obs, step, steps): {type(e).__name__}: {e}.") from e
