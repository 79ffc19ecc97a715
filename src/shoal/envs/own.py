"""An environment of your own, of Gymnasium's or PettingZoo's kind, by file or import path.

    shoal train ippo ./mine.py                 the one environment class in the file
    shoal train ippo ./mine.py:make_env        a class, or a function that makes one
    shoal train ippo my_package.worlds:Mine    the same by import path

Settings of its own are `--env.args`; what it is made of decides the rest: a `gymnasium.Env` is taken as by `gymnasium.py`, a
parallel or turn-based PettingZoo environment as by `pettingzoo.py`. The run keeps a copy of a file.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal.envs import gymnasium, pettingzoo
from shoal.envs.rows import Row
from shoal.envs.vector import Host
from shoal.flags import arguments
from shoal.ids import own_object
from shoal.spec import UserError


class Own(Host):
    rest: ClassVar[str] = "FILE.py:NAME"

    @dataclass(frozen=True)
    class Config(pettingzoo.PettingZoo.Config, gymnasium.GymConfig):
        id: str = ""  # file.py:Name or package.module:Name

        def __post_init__(self) -> None:
            gymnasium.GymConfig.__post_init__(self)

    @classmethod
    def row(cls, config: Any, drawn: bool = False) -> Row:
        make = own_object(config.id, "the environment")
        if not callable(make):
            raise UserError(f"{config.id} is {make!r:.60}: it must be a class or a function that makes an environment.")
        kwargs = arguments(config.args, "--env.args")
        try:
            drawing = drawn and "render_mode" in inspect.signature(make).parameters
            env = make(**kwargs, **({"render_mode": "rgb_array"} if drawing else {}))
        except Exception as e:  # whatever the user's code does
            raise UserError(f"{config.id} could not be made: {type(e).__name__}: {e}.") from e
        zoo = hasattr(env, "possible_agents")
        for name in ("skip",) if zoo else ("groups", "teams", "turns", "mortal", "common", "state"):
            if getattr(config, name) != getattr(cls.Config, name):
                kind = "Gymnasium" if zoo else "PettingZoo"
                flag = "--regroup" if name == "groups" else f"--env.{name}"
                raise UserError(f"{flag} is for environments of {kind}'s kind, and {config.id} is of the other.")
        if zoo:
            return pettingzoo.row_with_config(env, config)
        if not all(hasattr(env, x) for x in ("reset", "step", "action_space", "observation_space")):
            kind = type(env).__name__
            raise UserError(f"{config.id} made a {kind}, which is no environment of Gymnasium's or PettingZoo's kind.")
        return gymnasium.row_of(gymnasium.limited(env, config.horizon), config)


def claims(id: str) -> bool:
    return False
