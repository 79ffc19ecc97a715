"""Checkpoints: written aside and renamed, so that a file is whole or not there; loaded without running code.

A checkpoint holds all that a run needs to go on as if it had never stopped: weights, optimisers, normalisers and
schedules of every algorithm, the world, the memory, every generator, the counters, and how long the logs were.

A file is what `torch.save` writes, a zip archive, and `torch.load(path, weights_only=True)` reads it. The archive's comment is
a checksum of all that stands before it, which `read` compares. Files of before there was one end without.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

import torch
from torch import Tensor

from shoal import files
from shoal.spec import UserError

ENDS = b"PK\5\6"  # the record at an archive's end: 22 bytes, of which the last two say how long the comment is
MARK = b"shoal sha256 "
COMMENT = len(MARK) + 64
KEYS = {"shoal": int, "env": str, "algo": str, "step": int, "algorithms": dict}  # what every use of a checkpoint asks


@dataclass(frozen=True)
class SaveConfig:
    every: Literal["auto"] | int = "auto"  # environment steps between checkpoints; auto: a tenth of the run; 0: at the end only
    best: str = "auto"  # metric of evaluations whose best is kept as best.pt; auto: the first learning group's return; none
    keep: int = 2  # numbered checkpoints to keep, the newest; 0: none; -1: all
    nets: bool = False  # nets in files of their own as well, one an agent where agents share none: checkpoints/nets/

    def __post_init__(self) -> None:
        if self.every != "auto" and self.every < 0:
            raise UserError(f"--save.every is {self.every}: it is a number of steps, 0 for the end only.")
        if self.keep < -1:
            raise UserError(f"--save.keep is {self.keep}: it is a number of checkpoints, -1 for all.")


class DamagedError(Exception):
    """A file that is not as it was written."""


class _Hashed:
    """Hands on what is written to a file, and hashes it. What went wrong first is kept: PyTorch's writer ends with an error of
    its own, about positions."""

    def __init__(self, file: IO[bytes]):
        self.file, self.name, self.hash = file, file.name, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.hash.update(data)
        try:
            return self.file.write(data)
        except OSError as e:
            self.error = self.error or e
            raise

    def flush(self) -> None:
        self.file.flush()


def write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)  # and not the run's folder, if that is gone
    with files.writing(path) as f:
        hashed = _Hashed(f)
        try:
            torch.save(state, hashed)  # type: ignore[arg-type]  # it asks for `write` alone
        except RuntimeError:
            if hashed.error is None:
                raise
            raise hashed.error from None
        f.seek(-2, os.SEEK_END)
        f.write(COMMENT.to_bytes(2, "little") + MARK + hashed.hash.hexdigest().encode())


def age_of(path: Path) -> list[str]:
    """A remark on a file that has no checksum, if it is such."""
    with files.reading(path) as f:
        old = _length(f) is None
    return [f"{path} has no checksum, as an older version wrote it: damage would not be seen."] if old else []


def _length(f: BinaryIO) -> int | None:
    """How many bytes stand before the checksum; none where the file is of before there was one."""
    size = f.seek(0, os.SEEK_END)
    f.seek(max(0, size - 22 - COMMENT))
    tail = f.read()
    if tail[-22:].startswith(ENDS) and tail.endswith(b"\0\0"):
        return None
    comment = COMMENT.to_bytes(2, "little") + MARK
    if not tail.startswith(ENDS) or not tail[20:].startswith(comment):
        raise DamagedError
    return size - COMMENT


def _compare(f: BinaryIO) -> None:
    """Refuse a file whose checksum is another than its contents'."""
    length = _length(f)
    if length is None:
        return
    f.seek(0)
    digest, rest = hashlib.sha256(), length - 2
    while rest and (piece := f.read(min(rest, 1 << 20))):
        digest.update(piece)
        rest -= len(piece)
    digest.update(b"\0\0")  # the comment's length, before there was one
    f.seek(length + len(MARK))
    if digest.hexdigest().encode() != f.read():
        raise DamagedError


def read(path: Path, device: str | torch.device = "cpu", marked: bool = True) -> dict[str, Any]:
    """A checkpoint's contents; never runs what is in it. `marked`: it says that it is one of ours."""
    if not path.exists():
        what = f"there is no checkpoint {path}" if marked else f"a part of the run's replay is missing, {path}"
        raise UserError(f"{what}.")
    try:
        with files.reading(path) as f, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch has words of its own for strange files; ours are below
            _compare(f)
            f.seek(0)
            state = torch.load(f, map_location=device, weights_only=True)
    except UserError:
        raise
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} is no checkpoint of Shoal's: it holds more than tensors and numbers, and was not run."
        ) from None
    except Exception:  # PyTorch's reader fails in many ways
        hint = (
            ": play another one of the run's, or go on from it with `shoal resume RUN --from best|STEP|FILE`"
            if marked
            else ", and with it the run's replay: its policies can still be played"
        )
        raise UserError(f"{path} is damaged (truncated, changed, or not a checkpoint){hint}.") from None
    if not isinstance(state, dict) or (marked and not all(type(state.get(k)) is kind for k, kind in KEYS.items())):
        raise UserError(f"{path} is no checkpoint of Shoal's.")
    return state


def prune(folder: Path, keep: int) -> None:
    """Remove numbered checkpoints but the newest `keep`."""
    if keep < 0:
        return
    numbered = sorted(folder.glob("step-*.pt"), key=lambda p: int(re.sub(r"\D", "", p.stem) or 0))
    for path in numbered[: max(0, len(numbered) - keep)]:
        path.unlink()
        shutil.rmtree(folder / "nets" / path.stem, ignore_errors=True)


RENAMED = {"sight": "observations", "sights": "observations", "whole": "state_observations", "wild": "warmup"}


def renamed(weights: dict[str, Any], mine: Iterable[str]) -> dict[str, Any]:
    """An algorithm's state under the names of now, which are those of `mine`: older files have others."""
    heads, known = {k: str(k).partition(".")[0] for k in weights}, {k.partition(".")[0] for k in mine}
    now = {h: RENAMED.get(h, h) if h not in known else h for h in heads.values()}
    return {now[heads[k]] + str(k)[len(heads[k]) :]: x for k, x in weights.items()}


def misfits(mine: Any, theirs: Any, where: str = "") -> list[str]:
    """What keeps one tree of tensors and plain values from taking another's place, in words."""
    name = where or "it"
    if isinstance(mine, dict) and isinstance(theirs, dict):
        words = [f"{_under(where, k)} is missing" for k in mine if k not in theirs]
        words += [f"{_under(where, k)} is not known here" for k in theirs if k not in mine]
        return words + [w for k, x in mine.items() if k in theirs for w in misfits(x, theirs[k], _under(where, k))]
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return [f"{name} is {len(theirs)} long there and {len(mine)} here"]
        return [w for k, (x, y) in enumerate(zip(mine, theirs, strict=True)) for w in misfits(x, y, _under(where, k))]
    if isinstance(mine, Tensor) and type(theirs) is Tensor:
        if theirs.layout != torch.strided:
            return [f"{name} is {theirs.layout} there"]
        if mine.shape != theirs.shape:
            return [f"{name} is {list(theirs.shape)} there and {list(mine.shape)} here"]
        return [f"{name} is {theirs.dtype} there and {mine.dtype} here"] if mine.dtype != theirs.dtype else []
    if type(theirs) is type(mine) or (isinstance(mine, float) and type(theirs) is int):
        return []
    return [f"{name} is {type(theirs).__name__} there and {type(mine).__name__} here"]


def _under(where: str, key: Any) -> str:
    return f"{where}/{key}" if where else str(key)
