"""PPO, IPPO and MAPPO (Schulman et al., 2017; de Witt et al., 2020; Yu et al., 2022): clipped policy gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.algos.onpolicy import Data, OnPolicy
from shoal.ops import losses, schedules
from shoal.ops.schedules import Now


class PPO(OnPolicy):
    names = {"ippo": {"critic": "own"}, "mappo": {"critic": "world"}}
    measures_kl = True

    @dataclass(frozen=True)
    class Config(OnPolicy.Config):
        epochs: int = 4  # passes over a rollout
        minibatches: int = 4  # pieces of a pass; a piece holds whole moments, all agents of the group
        clip: float = 0.2  # how far a ratio may move and still count
        clip_schedule: str = "constant"  # as lr_schedule, without kl
        clip_last: float = 0.0  # share of the clip that its schedule ends at
        value_clip: float | None = 0.2  # how far a (normalised) value may move in an update; none: as far as it likes
        kl_stop: float | None = None  # no further step of the actor in an update once it moved so far; none: all steps
        advantage_every: Literal["rollout", "epoch", "minibatch"] = "rollout"  # how often advantages are computed anew

    clip: Tensor

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        c = self.config
        self.epochs, self.minibatches, self.value_clip = c.epochs, c.minibatches, c.value_clip
        self.kl_stop, self.again = c.kl_stop, c.advantage_every
        self._clip = schedules.make(c.clip_schedule, c.clip, c.clip * c.clip_last, "--algo.clip-schedule")
        self.register_buffer("clip", torch.tensor(c.clip, device=self.wild.device))

    def tune(self, now: Now) -> None:
        super().tune(now)
        self.clip.fill_(self._clip(now))

    def policy_loss(self, log_prob: Tensor, entropy: Tensor, data: Data) -> tuple[Tensor, dict[str, Tensor]]:
        old, advantage, mask = data["log_prob"], data["advantage"], data.get("mask")
        return losses.ppo(log_prob, entropy, old, advantage, mask, self.clip, self.entropy_weight, self.fused)
