"""Each agent sees a picture, a bright spot in one of four corners, and is paid for naming the corner; 8 steps, cut off.

The picture is [1, 8, 8], uint8. The spot, 2 x 2 pixels, is anywhere in its corner, a new one every step; the rest is
dim noise. With `vector` there are two numbers beside the picture, and the second of them asks for the opposite corner: neither
is enough alone. Best 8, random 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Probe
from shoal.spec import Discrete, EnvSpec, Frame, Group, Result, UserError

SIDE = 8
STEPS = 8


class ProbeImage(Probe):
    @dataclass(frozen=True)
    class Config:
        n: int = 1  # agents, each with a picture of its own
        vector: bool = False  # two numbers beside the picture, which matter as well

        def __post_init__(self) -> None:
            if not 1 <= self.n <= 1000:
                raise UserError(f"--env.n is {self.n}: this probe has 1 to 1000 agents.")

    def setup(self) -> None:
        n, picture = self.config.n, (1, SIDE, SIDE)
        self.noise_begin = self.noise_step = n * 4  # corner, place across and down, what is asked for
        shapes = {"picture": picture, "asks": (2,)} if self.config.vector else picture
        group = Group("agents", "agents", tuple(f"agent_{i}" for i in range(n)), shapes, Discrete(4))
        self.spec = EnvSpec((group,), horizon=STEPS)
        self.along = torch.arange(SIDE, device=self.device)
        self.dim = (torch.arange(SIDE * SIDE, device=self.device) * 37 % 64).reshape(SIDE, SIDE)  # the same in every picture

    def begin(self, noise: Tensor) -> State:
        corner, right, down, opposite = noise.reshape(self.rows, -1, 4).unbind(-1)  # each [B, N]
        whole = lambda x, n: (x * n).long().clamp(max=n - 1)  # noqa: E731
        return {"corner": whole(corner, 4), "right": whole(right, 3), "down": whole(down, 3), "opposite": opposite < 0.5}

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        right = (actions["agents"] == self.answer_to(state)).to(self.dtype)
        return Move(self.begin(noise), {"agents": Result(right, self.never(self.config.n))})

    def answer_to(self, state: State) -> Tensor:
        asked = state["opposite"] & self.config.vector
        return torch.where(asked, 3 - state["corner"], state["corner"])

    def observe(self, state: State) -> Frame:
        corner, half = state["corner"], SIDE // 2
        x = (corner % 2) * half + state["right"]  # [B, N] the spot's left edge
        y = corner.div(2, rounding_mode="floor") * half + state["down"]
        across = (self.along >= x[..., None]) & (self.along < x[..., None] + 2)  # [B, N, W]
        downward = (self.along >= y[..., None]) & (self.along < y[..., None] + 2)
        bright = downward[..., :, None] & across[..., None, :]
        picture = torch.where(bright, 255, self.dim).to(torch.uint8)[:, :, None]  # [B, N, 1, H, W]
        if not self.config.vector:
            return Frame({"agents": self.view(picture, state["clock"])})
        asks = torch.stack((~state["opposite"], state["opposite"]), -1).to(self.dtype)
        view = self.view(asks, state["clock"])
        view.obs = {"picture": picture, "asks": asks}
        return Frame({"agents": view})

    def solution(self, state: State) -> dict[str, Tensor]:
        return {"agents": self.answer_to(state)}

    @property
    def answer(self) -> Answer:
        return Answer({"agents": float(STEPS)}, {"agents": STEPS / 4}, slack=0.8)
