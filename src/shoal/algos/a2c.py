"""A2C, IA2C and MAA2C (Mnih et al., 2016; Papoudakis et al., 2021): plain policy gradients, one step a rollout."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.algos.onpolicy import Data, OnPolicy
from shoal.ops import losses


class A2C(OnPolicy):
    names = {"ia2c": {"critic": "own"}, "maa2c": {"critic": "world"}}

    @dataclass(frozen=True)
    class Config(OnPolicy.Config):
        rollout: int = 5  # steps between updates
        lam: float = 1.0  # GAE's lambda; 1: returns of as many steps as the rollout has

    def policy_loss(self, log_prob: Tensor, entropy: Tensor, data: Data) -> tuple[Tensor, dict[str, Tensor]]:
        return losses.a2c(log_prob, entropy, data["advantage"], data.get("mask"), self.entropy_weight)
