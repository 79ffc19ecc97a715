"""Choices that are allowed change every step, and one that is not costs -10; the best allowed one is shown. 8 steps.

Each choice but the best is allowed by a fair coin. The best pays 1, another allowed one 0; in `multi` (choices of 3 and
of 2) the share of the right ones is paid, and -10 as soon as one of them is not allowed. Stat `illegal` counts those,
and stays 0 for whoever masks where the action is drawn. Best 8; random over what is allowed pays a step
E[1 / (1 + K)] = (1 - 2 ** -n) / (n / 2), K of n - 1 coins: 3.1 an episode for the choice of 5, 16 / 3 in `multi`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Copying, Crowd, Probe, agent_group
from shoal.spec import Discrete, EnvSpec, Frame, MultiDiscrete, Result, UserError

STEPS, CHOICES = 8, 5
PENALTY = -10.0


class ProbeIllegal(Probe):
    @dataclass(frozen=True)
    class Config(Crowd):
        n: int = 2  # agents

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.actions == "continuous":
                raise UserError("--env.actions is 'continuous': choose discrete or multi, for only choices can be illegal.")

    def setup(self) -> None:
        self.task = Copying(Discrete(CHOICES) if self.config.actions == "discrete" else MultiDiscrete((3, 2)), self)
        first = [sum(self.task.space.sizes[:d]) for d in range(self.task.draws)]  # type: ignore[union-attr]
        self.first = self.index(first)  # [D] where each dimension's choices begin
        self.noise_begin = self.noise_step = self.config.n * (self.task.draws + CHOICES)
        group = agent_group(self.config.n, CHOICES, self.task.space, masked=True)
        self.spec = EnvSpec((group,), common=self.config.n == 1, horizon=STEPS, stats={"illegal": "sum"})

    def begin(self, noise: Tensor) -> State:
        split = self.config.n * self.task.draws
        symbol = self.task.draw(noise[:, :split])  # [B, N, D]
        coins = noise[:, split:].unflatten(1, (-1, CHOICES)) < 0.5
        return {"symbol": symbol, "legal": coins | (self.task.show(symbol) > 0)}  # [B, N, A]

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        taken = self.task.spread(actions["agents"]) + self.first  # [B, N, D] places in the mask
        allowed = state["legal"].gather(-1, taken).all(-1)
        reward = torch.where(allowed, self.task.score(state["symbol"], actions["agents"]), PENALTY)
        pay = Result(reward, self.never(self.config.n))
        return Move(self.begin(noise), {"agents": pay}, stats={"illegal": (~allowed).sum(-1).to(self.dtype)})

    def observe(self, state: State) -> Frame:
        return Frame({"agents": self.view(self.task.show(state["symbol"]), state["clock"], state["legal"])})

    def solution(self, state: State) -> dict[str, Tensor]:
        return {"agents": self.task.copy(state["symbol"])}

    @property
    def answer(self) -> Answer:
        sizes = (CHOICES,) if self.config.actions == "discrete" else (3, 2)
        guess = sum((1 - 0.5**n) / (n / 2) for n in sizes) / len(sizes)
        return Answer({"agents": float(STEPS)}, {"agents": STEPS * guess})
