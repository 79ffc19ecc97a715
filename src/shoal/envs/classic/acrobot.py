"""Acrobot: two links hang from a bar, with a motor in the joint between them; swing the tip above the bar (Sutton, 1996).

Observation: cos and sin of the first angle a (0 hanging down), cos and sin of the second b (from the first link), and both
speeds, within 4 pi and 9 pi. Action: torque -1, 0 or 1 on the joint. Pay: -1 a step, 0 for the last. The episode ends when
the tip is a link's length above the bar, -cos a - cos(a + b) > 1, and is cut off after 500 steps. Starts: all four numbers
anywhere in [-0.1, 0.1]. A step is Runge and Kutta's, of 0.2 s, then angles are wrapped and speeds clipped. With links of
length, mass and inertia 1, as in Sutton and Barto's book:

    d1 = 3.5 + cos b,   d2 = 1.25 + 0.5 cos b,   f2 = 4.9 sin(a + b),   f1 = f2 + 14.7 sin a - (0.5 b' + a') b' sin b,
    b'' = (torque + f1 d2 / d1 - 0.5 a'^2 sin b - f2) / (1.25 - d2^2 / d1),    a'' = -(d2 b'' + f1) / d1.

Proven against Gymnasium's Acrobot-v1 by injected state, tests/envs/classic/test_parity.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.classic.base import BLUE, DARK, GREY, Solo, wrapped
from shoal.envs.drawing import Circle, Line, Sketch
from shoal.spec import Discrete, Frame

DT, FASTEST = 0.2, (4 * math.pi, 9 * math.pi)


class Acrobot(Solo):
    @dataclass(frozen=True)
    class Config(Solo.Config):
        horizon: int = 500  # steps after which an episode is cut off

    names = {"Acrobot-v1": {}}
    sees, space = 6, Discrete(3)
    noise_begin = 4

    def setup(self) -> None:
        super().setup()
        self.fastest = self.tensor(FASTEST)

    def begin(self, noise: Tensor) -> State:
        start = noise * 0.2 - 0.1
        return {"angles": start[:, :2], "spins": start[:, 2:]}  # each [B, 2]

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        torque = (actions["agents"][:, 0] - 1).to(self.dtype)
        y = torch.cat((state["angles"], state["spins"]), -1)  # [B, 4]
        k1 = slope(y, torque)
        k2 = slope(y + DT / 2 * k1, torque)
        k3 = slope(y + DT / 2 * k2, torque)
        k4 = slope(y + DT * k3, torque)
        y = y + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        angles, spins = wrapped(y[:, :2]), y[:, 2:].clamp(-self.fastest, self.fastest)
        up = -angles[:, 0].cos() - angles.sum(-1).cos() > 1
        return self.move({"angles": angles, "spins": spins}, up.to(self.dtype) - 1, up)

    def observe(self, state: State) -> Frame:
        (a, b), spins = state["angles"].unbind(-1), state["spins"].unbind(-1)
        return self.show(state, a.cos(), a.sin(), b.cos(), b.sin(), *spins)

    def draw(self, row: int = 0) -> Sketch:
        a, b = self.state["angles"][row].tolist()
        x, y = math.sin(a), -math.cos(a)
        links = Line(0.0, 0.0, x, y, 0.16, BLUE), Line(x, y, x + math.sin(a + b), y - math.cos(a + b), 0.16, BLUE)
        joints = Circle(0.0, 0.0, 0.06, DARK), Circle(x, y, 0.06, DARK)
        return Sketch(joints, (), 2.0, (Line(-2.2, 1.0, 2.2, 1.0, 0.02, GREY), *links))


def slope(y: Tensor, torque: Tensor) -> Tensor:
    """The angles, then their speeds [B, 4] -> how fast each changes [B, 4]."""
    a, b, da, db = y.unbind(-1)
    d1, d2, sin_b = 3.5 + b.cos(), 1.25 + 0.5 * b.cos(), b.sin()
    f2 = 4.9 * (a + b).sin()
    f1 = f2 + 14.7 * a.sin() - (0.5 * db + da) * db * sin_b
    ddb = (torque + d2 / d1 * f1 - 0.5 * da.square() * sin_b - f2) / (1.25 - d2.square() / d1)
    return torch.stack((da, db, -(d2 * ddb + f1) / d1, ddb), -1)
