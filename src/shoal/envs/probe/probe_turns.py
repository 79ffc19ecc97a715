"""Two agents move in turn, and a move is paid in the step after it, while the other moves. 6 steps, then terminated.

The one to move sees a symbol of 2 and is paid 1 for copying it (with `copy` false: for moving); who begins is drawn for
each row. The last move, in step 5, is paid no more. The one who begins is paid 3 in all and the other 2: best 2.5 an
agent, random 1.25. An agent's reward is the plain sum between its own turns and gamma counts its own turns, so on
turn in step t with m = (6 - t) // 2 paid moves to come, V = (1 - gamma ** m) / (1 - gamma):

    step   0                    1          2          3   4   5
    V      1 + gamma + gamma^2  1 + gamma  1 + gamma  1   1   0

Whoever drops rewards that come out of turn learns V = 0 everywhere. Observation: the symbol (zeros while waiting) and
the step, one-hot. Both are alive throughout; the one who waits is not dead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Valued, agent_group, annuity
from shoal.spec import Discrete, EnvSpec, Frame, Result

STEPS = 6


class ProbeTurns(Valued):
    @dataclass(frozen=True)
    class Config:
        copy: bool = True  # pay a move for copying what is seen; false: for itself

    noise_begin, noise_step = 2, 1

    def setup(self) -> None:
        self.idle = not self.config.copy
        self.seats = self.index([0, 1])
        group = agent_group(2, 2 + STEPS, Discrete(2), mortal=True)
        self.spec = EnvSpec((group,), turns=True, horizon=STEPS)

    def begin(self, noise: Tensor) -> State:
        nothing = torch.zeros(self.rows, 2, dtype=self.dtype, device=self.device)
        coins = (noise >= 0.5).long()
        return {"first": coins[:, 0], "symbol": coins[:, 1], "due": nothing}  # due [B, N]: paid in the coming step

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        right = actions["agents"] == state["symbol"][:, None] if self.config.copy else torch.ones_like(actions["agents"]) > 0
        due = (right & self.to_move(state)).to(self.dtype)
        pay = Result(state["due"], self.last(state)[:, None].expand(-1, 2))
        return Move({"first": state["first"], "symbol": (noise[:, 0] >= 0.5).long(), "due": due}, {"agents": pay})

    def observe(self, state: State) -> Frame:
        moves, clock = self.to_move(state), state["clock"]
        step = self.onehot(clock, STEPS)[:, None].expand(-1, 2, -1)
        symbol = self.onehot(state["symbol"], 2)[:, None] * moves[..., None]
        view = self.view(torch.cat((symbol, step), -1), clock)
        view.active = moves
        return Frame({"agents": view})

    def to_move(self, state: State) -> Tensor:
        return ((state["clock"] + state["first"]) % 2)[:, None] == self.seats  # [B, N]

    def solution(self, state: State) -> dict[str, Tensor]:
        return {"agents": state["symbol"][:, None].expand(-1, 2)}

    @property
    def answer(self) -> Answer:
        return Answer({"agents": 2.5}, {"agents": 1.25 if self.config.copy else 2.5}, slack=0.25)

    def states(self) -> State:
        clock, first, symbol, due = self.every(list(range(STEPS)), [0, 1], [0, 1], [(0.0, 0.0)])
        return {"clock": clock, "first": first, "symbol": symbol, "due": due}

    def values(self, gamma: float) -> dict[str, Tensor]:
        states = self.states()
        worth = annuity(gamma, ((STEPS - states["clock"]) // 2).to(self.dtype))
        return {"agents": worth[:, None] * self.to_move(states)}
