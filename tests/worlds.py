"""The worlds that tests run over, from the catalogue: a new file is found wherever it lies."""

from __future__ import annotations

from typing import Any

from shoal import ids


def native_worlds() -> list[str]:
    """The ids of all native worlds; of ids that are equal settings of one class the first."""
    by_settings: dict[Any, str] = {}
    for id, e in ids.catalog("envs").items():
        if e.native:
            by_settings.setdefault((e.module, e.cls, e.load().Config(**e.settings)), id)
    return list(by_settings.values())


def probes() -> list[str]:
    """The ids of worlds whose best returns and values are known."""
    from shoal.envs.probe.base import Probe

    return [id for id in native_worlds() if issubclass(ids.catalog("envs")[id].load(), Probe)]
