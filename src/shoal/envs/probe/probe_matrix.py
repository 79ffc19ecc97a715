"""Two agents choose once, each one of three, and both are paid what the matrix says (Claus and Boutilier, 1998).

    climbing   11 -30   0        penalty    k   0  10
              -30   7   6                   0   2   0        k = -100
                0   0   5                  10   0   k

The best joint choice pays 11 and 10, but beside a partner who still explores it costs -30 or k: relative
overgeneralisation. Against a uniform partner the rows of `climbing` are worth -6.3, -5.7, 1.7 and its columns -6.3,
-7.7, 3.7, so learners first meet in the safe corner 5; from there the row player gains by 6 and then the column player
by 7, and in 7 both stay (exact gradients from a near-uniform start end in 6 or 7). In `penalty` they meet in the
middle, 2, and stay. A value that is a sum (VDN) or monotone (QMIX) in the agents' own cannot hold either matrix: no
order of rows and columns makes it rise both ways. The best such fit to uniform play has its peak at 5, and at 2. Hence
the floors below; 11 and 10 are luck. Uniform play earns -31 / 9 and (2 k + 22) / 9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Probe, agent_group, check
from shoal.spec import Discrete, EnvSpec, Frame, Result, UserError

Payoff = Literal["climbing", "penalty"]


class ProbeMatrix(Probe):
    @dataclass(frozen=True)
    class Config:
        payoff: Payoff = "climbing"  # the matrix: climbing or penalty
        k: float = -100.0  # what the corners of the penalty game pay

        def __post_init__(self) -> None:
            check(self.payoff, Payoff, "payoff")
            if self.k > 0:
                raise UserError(f"--env.k is {self.k}: a penalty is 0 or less.")

    # payoff -> family of learners -> what its greedy policy reaches at least; `joint` is the best there is
    expected: ClassVar[dict[str, dict[str, float]]] = {
        "climbing": {"policy": 5.0, "independent": 5.0, "sum": 5.0, "monotone": 5.0, "joint": 11.0},
        "penalty": {"policy": 2.0, "independent": 2.0, "sum": 2.0, "monotone": 2.0, "joint": 10.0},
    }

    def setup(self) -> None:
        k, climbing = self.config.k, self.config.payoff == "climbing"
        penalty = ((k, 0, 10), (0, 2, 0), (10, 0, k))
        self.table = self.tensor(((11, -30, 0), (-30, 7, 6), (0, 0, 5)) if climbing else penalty)
        self.joint = self.index([0, 0] if climbing else [0, 2]).expand(self.rows, 2)
        self.one = self.tensor(1.0).expand(self.rows, 2, 1)
        self.spec = EnvSpec((agent_group(2, 1, Discrete(3)),), common=True, horizon=1)

    def begin(self, noise: Tensor) -> State:
        return {}

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        a = actions["agents"]
        reward = self.table[a[:, 0], a[:, 1]][:, None].expand(-1, 2)
        return Move(state, {"agents": Result(reward, self.last(state)[:, None].expand(-1, 2))})

    def observe(self, state: State) -> Frame:
        return Frame({"agents": self.view(self.one, state["clock"])})

    def solution(self, state: State) -> dict[str, Tensor]:
        return {"agents": self.joint}

    @property
    def answer(self) -> Answer:
        reach = self.expected[self.config.payoff]
        random = -31 / 9 if self.config.payoff == "climbing" else (2 * self.config.k + 22) / 9
        return Answer({"agents": reach["joint"]}, {"agents": random}, least={"agents": reach["policy"]})
