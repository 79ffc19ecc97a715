"""Three agents: one dies after 3 steps, one after 5, one comes after 2 and dies after 8, which ends the episode.

    agent_0 lives in steps 0 1 2        agent_1 in steps 2 ... 7        agent_2 in steps 0 ... 4

The living see a symbol of 2 and the step, one-hot, and are paid 1 for copying it (with `copy` false: for being there).
Every life ends by termination, so V_i(t) = (1 - gamma ** (d_i - t)) / (1 - gamma) with d = 3, 8, 5; it is 1 in the last
living step. The dead and those to come see zeros, earn 0, and are paid `ghost` as shaping, which reaches a loss only
if that loss forgets to mask them. Best 14 / 3 an agent, random 7 / 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Copying, Valued, agent_group, annuity
from shoal.spec import Discrete, EnvSpec, Frame, Result, View

LIVES = ((0, 3), (2, 8), (0, 5))  # first step, and the step before which it is dead
STEPS = 8


class ProbeDeaths(Valued):
    @dataclass(frozen=True)
    class Config:
        copy: bool = True  # pay the living for copying what they see; false: for being there
        ghost: float = 10.0  # shaping paid to those who are not there: it must enter no loss

    def setup(self) -> None:
        self.task, self.idle = Copying(Discrete(2), self), not self.config.copy
        self.noise_begin = self.noise_step = 3
        self.arrival, self.death = self.index([a for a, _ in LIVES]), self.index([d for _, d in LIVES])  # [N]
        self.spec = EnvSpec((agent_group(3, 2 + STEPS, self.task.space, mortal=True),), horizon=STEPS)

    def begin(self, noise: Tensor) -> State:
        return {"symbol": self.task.draw(noise)}  # [B, N, 1]

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        alive = self.alive(state)
        score = (
            self.task.score(state["symbol"], actions["agents"])
            if self.config.copy
            else torch.ones_like(alive, dtype=self.dtype)
        )
        dies = alive & (state["clock"][:, None] + 1 == self.death)
        pay = Result(score * alive, dies, self.config.ghost * (~alive).to(self.dtype))
        return Move({"symbol": self.task.draw(noise)}, {"agents": pay})

    def observe(self, state: State) -> Frame:
        alive, clock = self.alive(state), state["clock"]
        step = self.onehot(clock, STEPS)[:, None].expand(-1, 3, -1)
        obs = torch.cat((self.task.show(state["symbol"]), step), -1) * alive[..., None]
        return Frame({"agents": View(obs, alive, alive, clock[:, None] == self.arrival)})

    def alive(self, state: State) -> Tensor:
        clock = state["clock"][:, None]
        return (clock >= self.arrival) & (clock < self.death)  # [B, N]

    def solution(self, state: State) -> dict[str, Tensor]:
        return {"agents": self.task.copy(state["symbol"])}

    @property
    def answer(self) -> Answer:
        return Answer({"agents": 14 / 3}, {"agents": 7 / 3 if self.config.copy else 14 / 3}, slack=0.4)

    def states(self) -> State:
        clock, *symbol = self.every(list(range(STEPS)), *[[0, 1]] * 3)
        return {"clock": clock, "symbol": torch.stack(symbol, -1)[..., None]}

    def values(self, gamma: float) -> dict[str, Tensor]:
        states = self.states()
        left = (self.death - states["clock"][:, None]) * self.alive(states)
        return {"agents": annuity(gamma, left.to(self.dtype))}
