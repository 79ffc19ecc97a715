"""A replay's contents beside the last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.buffers.replay import ReplayBuffer
from shoal.training import checkpoint

PIECE = 1 << 28  # bytes that are copied at once


def _is_part(held: Any) -> bool:
    """Whether it has the form of what `ReplayBuffer.read` gives."""
    parts = list(held.values())
    if not all(isinstance(p, dict) for p in parts):
        return False
    return all(isinstance(x, Tensor) and x.dim() and x.layout == torch.strided for p in parts for x in p.values())


class Segments:
    """A replay's contents beside the last checkpoint, as files that are written once and never changed:

        checkpoints/replay/<first step>-<last step>.pt     steps of each row, counted from the first ever

    A save adds what is new since the last one. A checkpoint names the files that it needs; others, left by a save that was
    killed or fallen out of the ring, are removed after the next.
    """

    def __init__(self, folder: Path):
        self.folder, self.spans = folder, list[list[int]]()

    def save(self, replay: ReplayBuffer, count: int) -> list[list[int]]:
        oldest = max(0, count - replay.steps)
        began = max(self.spans[-1][1] if self.spans else 0, oldest)
        most = max(1, PIECE * replay.steps // max(replay.bytes, 1))  # steps in a file
        for begin in range(began, count, most):
            end = min(begin + most, count)
            checkpoint.write(self._file(begin, end), replay.read(begin, end))
            self.spans.append([begin, end])
        self.spans = [s for s in self.spans if s[1] > oldest]
        return [list(s) for s in self.spans]

    def prune(self) -> None:
        keep = {self._file(*s).name for s in self.spans}
        for path in self.folder.glob("*-*.pt*"):
            if path.name not in keep:
                path.unlink()

    def load(self, replay: ReplayBuffer, spans: list[list[int]], count: int) -> None:
        oldest = max(0, count - replay.steps)
        for begin, end in spans:
            held = checkpoint.read(self._file(begin, end), marked=False)
            skip = max(oldest - begin, 0)  # what has been overwritten since
            parts = {k: {d: x[skip:] for d, x in part.items()} for k, part in held.items()} if _is_part(held) else {}
            replay.write(begin + skip, end, parts)
        replay.count.fill_(count)
        self.spans = [list(s) for s in spans]

    def _file(self, begin: int, end: int) -> Path:
        return self.folder / f"{begin:012d}-{end:012d}.pt"
