"""Level-based foraging: `lbforaging/Foraging-8x8-2p-3f-v3`. Agents of several levels pick up food together (Albrecht, 2013).

Every agent is paid for the food that it helped to pick up, so that all of an episode's food is worth one in all. The library
calls its limit of time an end; here only an empty field terminates. Needs `pip install lbforaging`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from shoal.envs.gymnasium import Gymnasium, TupleRow
from shoal.envs.rows import Slots


class _ForagingRow(TupleRow):
    def reset(self, seed: int, out: Slots) -> None:
        for player in self.env.unwrapped.players:  # or they stand in the way of where they begin, and seeds do not repeat
            player.position = None
        super().reset(seed, out)

    def terminated(self, ended: Any) -> Any:
        return not self.env.unwrapped.field.any()


class LevelBasedForaging(Gymnasium):
    rest: ClassVar[str] = "ID"
    library: ClassVar[str] = "lbforaging"
    several_as: ClassVar[type[TupleRow]] = _ForagingRow


def claims(id: str) -> bool:
    return id.startswith("Foraging-")
