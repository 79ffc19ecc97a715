"""mpe2's particle worlds as the library steps them, for comparison with the native ones.

    shoal train mappo mpe2/simple_tag_v3 --env.args num_good=2,continuous_actions=true

`simple_tag` and its kin in this package are the same worlds, proven step by step, and thousands of times faster: train on
those. Here the agents of a world all stay to the end. The rest is as in `pettingzoo.py`; a team is as there a group, unless
`teams` says otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from shoal.envs.pettingzoo import PettingZoo


def claims(id: str) -> bool:
    """Whether a bare id looks like one of its worlds."""
    return re.fullmatch(r"(simple(_\w+)?|collect_treasure)_v\d+", id) is not None


class MPE2(PettingZoo):
    package: ClassVar[str] = "mpe2"
    rest: ClassVar[str] = "NAME_vN"

    @dataclass(frozen=True)
    class Config(PettingZoo.Config):
        id: str = ""  # the world, such as simple_tag_v3
        mortal: Literal["auto"] | bool = False  # agents may leave before the end; none does
