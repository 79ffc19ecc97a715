"""The multi-robot warehouse: `rware/rware-tiny-2ag-v2`. Robots fetch the shelves that are asked for and bring them back.

Rewards are rare: one for each shelf delivered. Needs `pip install rware`.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.envs.gymnasium import Gymnasium


class Warehouse(Gymnasium):
    rest: ClassVar[str] = "ID"
    library: ClassVar[str] = "rware"


def claims(id: str) -> bool:
    return id.startswith("rware-")
