"""Multi-agent MuJoCo (Peng et al., 2021, https://arxiv.org/abs/2003.06709): one body, whose joints are shared out among agents.

    shoal train mappo mamujoco/Ant-4x2 --env.args agent_obsk=2

The id is the body and how it is divided, `Ant-4x2`: four agents of two joints each; a body alone (`Ant`) is one agent. It is
gymnasium-robotics' `mamujoco_v1`, whose further settings are `args`: `agent_obsk`, how many joints away an agent sees, and
those of the body. All agents are one team, are paid alike and live and die together. Agents that see or move unequally many
joints are groups of their own: `agent_0`, `agent_1`. The rest is as in `pettingzoo.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from shoal.envs.pettingzoo import PettingZoo, imported, made
from shoal.envs.rows import Row
from shoal.ids import near
from shoal.spec import UserError

BODIES = {  # and how they are divided
    "Ant": "2x4, 2x4d or 4x2",
    "HalfCheetah": "2x3 or 6x1",
    "Hopper": "3x1",
    "Humanoid": "9|8",
    "HumanoidStandup": "9|8",
    "Reacher": "2x1",
    "Pusher": "3p",
    "Swimmer": "2x1",
    "Walker2d": "2x3",
    "CoupledHalfCheetah": "1p1",
    "ManySegmentSwimmer": "agents x joints, such as 10x2",
    "ManySegmentAnt": "agents x segments, such as 2x3",
}


def claims(id: str) -> bool:
    """Whether a bare id looks like a body and how it is divided; Ant-v5 is Gymnasium's."""
    return id.partition("-")[0] in BODIES and re.fullmatch(r"\w+-(?!v\d)\S+", id) is not None


class MaMuJoCo(PettingZoo):
    rest: ClassVar[str] = "BODY-DIVISION"

    @dataclass(frozen=True)
    class Config(PettingZoo.Config):
        id: str = ""  # body and division: Ant-4x2
        teams: str = "all"  # which groups win together: name=group+group, or all; those not named are teams of their own
        mortal: Literal["auto"] | bool = False  # agents may leave before the end; none does
        common: bool = True  # the agents of a team are always paid alike

    @classmethod
    def row(cls, config: Any, drawn: bool = False) -> Row:
        row: Any = super().row(config, drawn)
        limit = getattr(row.env.unwrapped.single_agent_env, "_max_episode_steps", None)
        row.spec = replace(row.spec, horizon=limit)
        return row

    @classmethod
    def make(cls, config: Any, drawn: bool) -> Any:
        body, _, division = config.id.partition("-")
        if body not in BODIES:
            raise UserError(f"mamujoco has no body {body!r}{near(body, BODIES) or '; it has ' + ', '.join(BODIES)}.")
        if config.turns is True:
            raise UserError("--env.turns is true, and the joints of a body move at once.")
        library = imported("gymnasium_robotics").mamujoco_v1
        try:
            return made(library.parallel_env, config, drawn, scenario=body, agent_conf=division or None)
        except UserError as e:
            if "partitioning" in str(e):
                raise UserError(f"mamujoco cannot divide {body} as {division!r}: it takes {BODIES[body]}.") from e
            raise
