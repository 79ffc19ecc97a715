"""MountainCar: a car too weak to climb the hill on the right has to swing up from the left (Moore, 1990).

Observation: place in [-1.2, 0.6] and speed in [-0.07, 0.07]. Action: push left (0), roll (1), push right (2). Pay: -1 a
step. The episode ends at place 0.5 with at least `goal_velocity`, and is cut off after 200 steps. Starts: still, anywhere
in [-0.6, -0.4]. The height is sin(3 x), the wall on the left takes all speed away, and a step is

    v <- clip(v + 0.001 (action - 1) - 0.0025 cos(3 x)),    x <- clip(x + v).

Proven against Gymnasium's MountainCar-v0 by injected state, tests/envs/classic/test_parity.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.classic.base import BLUE, DARK, GREEN, GREY, Solo
from shoal.envs.drawing import Circle, Line, Sketch
from shoal.spec import Discrete, Frame, Space

WALL, END, FASTEST, GRAVITY = -1.2, 0.6, 0.07, 0.0025


class MountainCar(Solo):
    @dataclass(frozen=True)
    class Config(Solo.Config):
        horizon: int = 200  # steps after which an episode is cut off
        goal_velocity: float = 0.0  # the least speed that counts at the goal

    names = {"MountainCar-v0": {}}
    sees = 2
    space: ClassVar[Space] = Discrete(3)
    goal = 0.5
    noise_begin = 1

    def begin(self, noise: Tensor) -> State:
        place = noise[:, 0] * 0.2 - 0.6  # [B]
        return {"place": place, "speed": torch.zeros_like(place)}

    def push(self, action: Tensor) -> Tensor:
        return (action[:, 0] - 1).to(self.dtype) * 0.001

    def pay(self, action: Tensor, there: Tensor) -> Tensor:
        return -torch.ones_like(there, dtype=self.dtype)

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        action = actions["agents"]
        speed = state["speed"] + (self.push(action) - GRAVITY * (3 * state["place"]).cos())
        speed = speed.clamp(-FASTEST, FASTEST)
        place = (state["place"] + speed).clamp(WALL, END)
        speed = torch.where((place == WALL) & (speed < 0), 0.0, speed)
        there = (place >= self.goal) & (speed >= self.config.goal_velocity)
        return self.move({"place": place, "speed": speed}, self.pay(action, there), there)

    def observe(self, state: State) -> Frame:
        return self.show(state, state["place"], state["speed"])

    def draw(self, row: int = 0) -> Sketch:
        def ground(x: float) -> tuple[float, float]:
            return x - (WALL + END) / 2, 0.45 * math.sin(3 * x)

        hill = (Line(*a, *b, 0.015, GREY) for a, b in pairwise(ground(WALL + i * 0.03) for i in range(61)))
        place, (foot, base) = float(self.state["place"][row]), ground(self.goal)
        pole = Line(foot, base, foot, base + 0.25, 0.015, DARK)
        flag = Line(foot + 0.025, base + 0.225, foot + 0.1, base + 0.225, 0.05, GREEN)
        (x0, y0), (x1, y1) = ground(place - 0.04), ground(place + 0.04)
        wheels = Circle(x0, y0 + 0.03, 0.025, DARK), Circle(x1, y1 + 0.03, 0.025, DARK)
        return Sketch(wheels, (), (END - WALL) / 2, (*hill, flag, pole, Line(x0, y0 + 0.06, x1, y1 + 0.06, 0.06, BLUE)))
