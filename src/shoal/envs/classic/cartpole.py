"""CartPole: keep a pole upright on a cart by pushing the cart left or right (Barto, Sutton and Anderson, 1983).

Observation: the cart's place x and speed, the pole's angle (0 upright, positive to the right) and its speed. Action: push
left (0) or right (1), with 10 N. Pay: 1 a step, that of the fall included; with `sutton_barto_reward` 0, and -1 for the
fall. The episode ends when |x| > 2.4 or the angle is beyond 12 degrees, and is cut off after 500 steps (CartPole-v0: 200).
Starts: all four numbers anywhere in [-0.05, 0.05]. A step is Euler's, of 0.02 s: with the cart of mass 1 and the pole of
mass 0.1 and half-length 0.5,

    p = (force + 0.05 w^2 sin a) / 1.1,    w' = (9.8 sin a - p cos a) / (0.5 (4/3 - 0.1 cos^2 a / 1.1)),
    v' = p - 0.05 w' cos a / 1.1.

Proven against Gymnasium's CartPole-v1 by injected state, tests/envs/classic/test_parity.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.classic.base import BLUE, DARK, GREY, RED, Solo
from shoal.envs.drawing import Circle, Line, Sketch
from shoal.spec import Discrete, Frame

GRAVITY, POLE, TOTAL, LENGTH, FORCE, DT = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02  # masses of the pole and of both; half the pole
EDGE, TILT = 2.4, 12 * 2 * math.pi / 360


class CartPole(Solo):
    @dataclass(frozen=True)
    class Config(Solo.Config):
        horizon: int = 500  # steps after which an episode is cut off
        sutton_barto_reward: bool = False  # pay 0 a step and -1 for the fall, instead of 1 a step

    names = {"CartPole-v1": {}, "CartPole-v0": {"horizon": 200}}
    sees, space = 4, Discrete(2)
    noise_begin = 4

    def begin(self, noise: Tensor) -> State:
        return dict(zip(("x", "v", "angle", "spin"), (noise * 0.1 - 0.05).unbind(-1), strict=True))  # each [B]

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        x, v, angle, spin = state["x"], state["v"], state["angle"], state["spin"]
        force = (actions["agents"][:, 0] * 2 - 1).to(self.dtype) * FORCE
        sin, cos = angle.sin(), angle.cos()
        push = (force + POLE * LENGTH * spin.square() * sin) / TOTAL
        turn = (GRAVITY * sin - cos * push) / (LENGTH * (4 / 3 - POLE * cos.square() / TOTAL))
        speed_up = push - POLE * LENGTH * turn * cos / TOTAL
        new = {"x": x + DT * v, "v": v + DT * speed_up, "angle": angle + DT * spin, "spin": spin + DT * turn}
        fell = (new["x"].abs() > EDGE) | (new["angle"].abs() > TILT)
        return self.move(new, -fell.to(self.dtype) if self.config.sutton_barto_reward else torch.ones_like(x), fell)

    def observe(self, state: State) -> Frame:
        return self.show(state, state["x"], state["v"], state["angle"], state["spin"])

    def draw(self, row: int = 0) -> Sketch:
        x, angle = float(self.state["x"][row]), float(self.state["angle"][row])
        tip = x + 2 * LENGTH * math.sin(angle), 2 * LENGTH * math.cos(angle)
        stops = (Line(side, -0.25, side, -0.05, 0.03, RED) for side in (-EDGE, EDGE))
        track, cart = Line(-EDGE, -0.15, EDGE, -0.15, 0.03, GREY), Line(x - 0.2, 0.0, x + 0.2, 0.0, 0.24, DARK)
        return Sketch((Circle(x, 0.0, 0.05, GREY),), (), EDGE, (track, *stops, cart, Line(x, 0.0, *tip, 0.09, BLUE)))
