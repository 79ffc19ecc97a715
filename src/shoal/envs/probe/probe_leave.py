"""Two agents and three steps: if `agent_0` leaves in the first, its team earns 8 when it is gone; if it stays, 1.

    agent_0 in step 0     paid in step 1           in step 2              the team
    0, stays              1, to agent_0            0                      1
    1, leaves             4, to agent_1            4, to agent_1          8

Whoever leaves terminates at once, and what is paid later is paid to the one who is there. With own pay an agent's return ends
with it, and agent_0 had better stay. With `--reward team-mean`, or `common` (both are paid what the team earns, while they
are there), its return goes on after its death (`--algo.after-death team`), and it must learn to leave: with gamma 0.9 that
is worth 6.84, and staying 0.9. A return that ends with the agent makes it stay for ever. Nothing else that anybody does
matters.

Returns, mean over the agents: 0.5 if agent_0 stays (1 with `common`) and 4 if it leaves; the stat `team` is the table's
last column. Observation: the step, one-hot, and whether agent_0 has left; what the gone are shown must not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Probe, agent_group
from shoal.spec import Discrete, EnvSpec, Frame, Result, View

STEPS = 3


class ProbeLeave(Probe):
    @dataclass(frozen=True)
    class Config:
        common: bool = False  # both agents are paid what the team earns; false: each its own

    def setup(self) -> None:
        self.stays = self.index([0, 1]) == 1  # [N] who never leaves
        self.wages = self.tensor([0.0, 1.0, 0.0]), self.tensor([0.0, 4.0, 4.0])  # of the team, each step
        group = agent_group(2, STEPS + 1, Discrete(2), mortal=True)
        self.spec = EnvSpec((group,), common=self.config.common, horizon=STEPS, stats={"team": "sum"})

    def begin(self, noise: Tensor) -> State:
        return {"left": torch.zeros(self.rows, dtype=torch.bool, device=self.device)}

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        left, clock = state["left"], state["clock"]
        step = self.onehot(clock, STEPS)  # [B, T]
        wage = torch.where(left, (step * self.wages[1]).sum(-1), (step * self.wages[0]).sum(-1))  # [B]
        alive = self.alive(state)
        paid = alive if self.config.common else left[:, None] == self.stays
        leaves = (clock == 0) & (actions["agents"][:, 0] == 1)
        ended = alive & (self.last(state)[:, None] | (leaves[:, None] & ~self.stays))
        return Move({"left": left | leaves}, {"agents": Result(wage[:, None] * paid, ended)}, stats={"team": wage})

    def observe(self, state: State) -> Frame:
        seen = torch.cat((self.onehot(state["clock"], STEPS), state["left"].to(self.dtype)[:, None]), -1)
        alive = self.alive(state)
        start = (state["clock"] == 0)[:, None].expand_as(alive)
        return Frame({"agents": View(seen[:, None].expand(-1, 2, -1), alive, alive, start)})

    def alive(self, state: State) -> Tensor:
        return self.stays | ~state["left"][:, None]  # [B, N]

    def solution(self, state: State) -> dict[str, Tensor]:
        return {"agents": torch.full((self.rows, 2), int(self.config.common), device=self.device)}

    @property
    def answer(self) -> Answer:
        if self.config.common:
            return Answer({"agents": 4.0}, {"agents": (1 + 4) / 2})
        return Answer({"agents": 0.5}, {"agents": (0.5 + 4) / 2})
