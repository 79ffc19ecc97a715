"""Pendulum: swing a rod up and hold it there, with a motor too weak to lift it in one go.

Observation: cos a, sin a (a = 0 upright) and the speed w in [-8, 8]. Action: a torque u, clipped to [-2, 2]. Pay, by the
state before the step: -(a^2 + 0.1 w^2 + 0.001 u^2), with a in [-pi, pi] and the clipped u: between -16.27 and 0. No
episode ends early; each is cut off after 200 steps. Starts: any angle, and a speed in [-1, 1]. A step is

    w <- clip(w + 0.05 (1.5 g sin a + 3 u)),    a <- a + 0.05 w.

Proven against Gymnasium's Pendulum-v1 by injected state, tests/envs/classic/test_parity.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.classic.base import DARK, RED, Solo, wrapped
from shoal.envs.drawing import Circle, Line, Sketch
from shoal.spec import Box, Frame

FASTEST, STRONGEST, DT = 8.0, 2.0, 0.05


class Pendulum(Solo):
    @dataclass(frozen=True)
    class Config(Solo.Config):
        horizon: int = 200  # steps of an episode
        g: float = 10.0  # gravity

    names = {"Pendulum-v1": {}}
    sees, space = 3, Box((-STRONGEST,), (STRONGEST,))
    noise_begin, fixed_length = 2, True

    def begin(self, noise: Tensor) -> State:
        angle, spin = (noise * 2 - 1).unbind(-1)  # [B]
        return {"angle": angle * math.pi, "spin": spin}

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        angle, spin = state["angle"], state["spin"]
        torque = actions["agents"][:, 0, 0].to(self.dtype).clamp(-STRONGEST, STRONGEST)
        cost = wrapped(angle).square() + 0.1 * spin.square() + 0.001 * torque.square()
        spin = (spin + (1.5 * self.config.g * angle.sin() + 3 * torque) * DT).clamp(-FASTEST, FASTEST)
        return self.move({"angle": angle + spin * DT, "spin": spin}, -cost)

    def observe(self, state: State) -> Frame:
        return self.show(state, state["angle"].cos(), state["angle"].sin(), state["spin"])

    def draw(self, row: int = 0) -> Sketch:
        angle = float(self.state["angle"][row])
        rod = Line(0.0, 0.0, -math.sin(angle), math.cos(angle), 0.2, RED)  # Gymnasium's picture: angles grow to the left
        return Sketch((Circle(0.0, 0.0, 0.05, DARK),), (), 1.0, (rod,))
