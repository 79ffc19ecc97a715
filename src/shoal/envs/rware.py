"""The multi-robot warehouse: `rware/rware-tiny-2ag-v2`. Robots fetch the shelves that are asked for and bring them back.

Rewards are rare: one for each shelf delivered. The library calls its limit of time an end; here nothing terminates. Needs
`pip install rware`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from shoal.envs.gymnasium import Gymnasium, TupleRow


class _WarehouseRow(TupleRow):
    def terminated(self, ended: Any) -> Any:
        return False


class Warehouse(Gymnasium):
    rest: ClassVar[str] = "ID"
    library: ClassVar[str] = "rware"
    several_as: ClassVar[type[TupleRow]] = _WarehouseRow


def claims(id: str) -> bool:
    return id.startswith("rware-")
