"""Level-based foraging: `lbforaging/Foraging-8x8-2p-3f-v3`. Agents of several levels pick up food together (Albrecht, 2013).

Every agent is paid for the food that it helped to pick up, so that all of an episode's food is worth one in all.
Needs `pip install lbforaging`.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.envs.gymnasium import Gymnasium


class LevelBasedForaging(Gymnasium):
    rest: ClassVar[str] = "ID"
    library: ClassVar[str] = "lbforaging"


def claims(id: str) -> bool:
    return id.startswith("Foraging-")
