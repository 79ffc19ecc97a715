"""Two teams with unequal numbers, observations and actions: `pair` (two agents) and `lone` (one). 8 steps, cut off.

Everybody sees a symbol of its own and is paid for copying it; the kind of action is an option of each group:

                 pair                random             lone           random
    discrete     of 3                8 / 3              of 2           4
    multi        of 3 and of 2       10 / 3             of 2 and of 4  3
    continuous   [-2, 1] x [0, 2]    -26 / 3            [-1, 0.5]      -3

Best is 8 where discrete or multi, 0 where continuous. With `pay = opposed` each is paid its own score less the mean of
the other team's: the best is the difference of the two columns, as is random. With `shaped` pair_1 is paid minus twice
its score on top, never reported: it is then best off missing (0, or -91 / 3 where continuous), which halves pair's return
where the learner is paid the shaping. A report with the shaping in it would show 0 for a random pair, not 8 / 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import SPACES, Answer, Copying, Kind, Probe, agent_group, check
from shoal.spec import Box, Discrete, EnvSpec, Frame, MultiDiscrete, Result, Space

STEPS = 8
LONE: dict[str, Space] = {"discrete": Discrete(2), "multi": MultiDiscrete((2, 4)), "continuous": Box((-1.0,), (0.5,))}
Paid = Literal["own", "opposed"]


class ProbeTeams(Probe):
    @dataclass(frozen=True)
    class Config:
        pair: Kind = "discrete"  # kind of the pair's actions: discrete, multi or continuous
        lone: Kind = "discrete"  # kind of the lone agent's actions: discrete, multi or continuous
        pay: Paid = "own"  # own score, or opposed: less the other team's mean score
        shaped: bool = False  # pay pair_1 for missing, as shaping

        def __post_init__(self) -> None:
            check(self.pair, Kind, "pair")
            check(self.lone, Kind, "lone")
            check(self.pay, Paid, "pay")

    def setup(self) -> None:
        self.pair, self.lone = Copying(SPACES[self.config.pair], self), Copying(LONE[self.config.lone], self)
        groups = (
            agent_group(2, self.pair.width, self.pair.space, "pair"),
            agent_group(1, self.lone.width, self.lone.space, "lone"),
        )
        self.noise_begin = self.noise_step = 2 * self.pair.draws + self.lone.draws
        self.against = float(self.config.pay == "opposed")
        self.bribe = self.tensor([0.0, -2.0])
        self.spec = EnvSpec(groups, horizon=STEPS, stats={"score_pair": "mean", "score_lone": "mean"})

    def begin(self, noise: Tensor) -> State:
        split = 2 * self.pair.draws
        return {"pair": self.pair.draw(noise[:, :split]), "lone": self.lone.draw(noise[:, split:])}  # [B, N, D]

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        pair = self.pair.score(state["pair"], actions["pair"])  # [B, 2]
        lone = self.lone.score(state["lone"], actions["lone"])  # [B, 1]
        shaping = pair * self.bribe if self.config.shaped else None
        results = {
            "pair": Result(pair - self.against * lone, self.never(2), shaping),
            "lone": Result(lone - self.against * pair.mean(-1, keepdim=True), self.never(1)),
        }
        return Move(self.begin(noise), results, stats={"score_pair": pair.mean(-1), "score_lone": lone[:, 0]})

    def observe(self, state: State) -> Frame:
        clock = state["clock"]
        return Frame({g: self.view(task.show(state[g]), clock) for g, task in (("pair", self.pair), ("lone", self.lone))})

    def solution(self, state: State) -> dict[str, Tensor]:
        """What pays best, shaping included."""
        pair = state["pair"]
        if self.config.shaped:  # pair_1 does its worst
            if isinstance(self.pair.space, Box):
                far = torch.where(pair > self.pair.low + self.pair.range / 2, self.pair.low, self.pair.low + self.pair.range)
            else:
                far = (pair + 1) % self.pair.sizes
            pair = torch.stack((pair[:, 0], far[:, 1]), 1)
        return {"pair": self.pair.copy(pair), "lone": self.lone.copy(state["lone"])}

    @property
    def answer(self) -> Answer:
        worse = self.pair.worst if self.config.shaped else self.pair.best
        best = self._returns((self.pair.best + worse) / 2, self.lone.best)
        return Answer(best, self._returns(self.pair.random, self.lone.random))

    def _returns(self, pair: float, lone: float) -> dict[str, float]:
        return {"pair": STEPS * (pair - self.against * lone), "lone": STEPS * (lone - self.against * pair)}
