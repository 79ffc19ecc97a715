"""TensorBoard events: a scalar a metric, under train/ or eval/."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoard:
    def __init__(self, folder: Path, resumed_at: int | None):
        from torch.utils.tensorboard import SummaryWriter

        # what was written past the checkpoint is purged by TensorBoard when it reads the new events
        self.writer: Any = SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)

    def write(self, step: int, kind: str, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self.writer.close()
