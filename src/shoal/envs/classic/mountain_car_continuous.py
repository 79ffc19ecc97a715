"""MountainCarContinuous: the mountain car with a throttle, paid for arriving and charged for pushing.

As MountainCar, but for these. Action: one number, clipped to [-1, 1], that pushes with 0.0015 of it. Pay: 100 on arrival,
less 0.1 action^2 at every step, of the action as it was given. The goal is at 0.45, and the episode is cut off after 999
steps. To stand still costs nothing: a policy that does not find the goal early learns that.

Proven against Gymnasium's MountainCarContinuous-v0 by injected state, tests/envs/classic/test_parity.py. Gymnasium keeps
this state, alone of the five, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.envs.classic.mountain_car import MountainCar
from shoal.spec import Box


class MountainCarContinuous(MountainCar):
    @dataclass(frozen=True)
    class Config(MountainCar.Config):
        horizon: int = 999  # steps after which an episode is cut off

    names = {"MountainCarContinuous-v0": {}}
    space = Box((-1.0,), (1.0,))
    goal = 0.45

    def push(self, action: Tensor) -> Tensor:
        return action[:, 0, 0].to(self.dtype).clamp(-1, 1) * 0.0015

    def pay(self, action: Tensor, there: Tensor) -> Tensor:
        return there.to(self.dtype) * 100 - action[:, 0, 0].to(self.dtype).square() * 0.1
