"""Checkpoints: written aside and renamed, so that a file is whole or not there; loaded without running code.

A checkpoint holds all that a run needs to go on as if it had never stopped: weights, optimisers, normalisers and
schedules of every algorithm, the world, the memory, every generator, the counters, and how long the logs were.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from shoal.spec import UserError


@dataclass(frozen=True)
class SaveConfig:
    every: Literal["auto"] | int = "auto"  # environment steps between checkpoints; auto: a tenth of the run; 0: at the end only
    best: str = "auto"  # metric of evaluations whose best is kept as best.pt; auto: the first learning group's return; none
    keep: int = 2  # numbered checkpoints to keep, the newest; 0: none; -1: all
    nets: bool = False  # store each net in a file of its own as well: checkpoints/nets/<checkpoint>/<group>.<net>.pt

    def __post_init__(self) -> None:
        if self.every != "auto" and self.every < 0:
            raise UserError(f"--save.every is {self.every}: it is a number of steps, 0 for the end only.")
        if self.keep < -1:
            raise UserError(f"--save.keep is {self.keep}: it is a number of checkpoints, -1 for all.")


def write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".part")
    with aside.open("wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    aside.replace(path)


def read(path: Path, device: str | torch.device = "cpu", marked: bool = True) -> dict[str, Any]:
    """A checkpoint's contents; never runs what is in it. `marked`: it says that it is one of ours."""
    if not path.is_file():
        what = f"there is no checkpoint {path}" if marked else f"a part of the run's replay is missing, {path}"
        raise UserError(f"{what}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch has words of its own for strange files; ours are below
            state = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} is no checkpoint of Shoal's: it holds more than tensors and numbers, and was not run."
        ) from None
    except (RuntimeError, EOFError, zipfile.BadZipFile, OSError, LookupError, ValueError):
        hint = (
            ": use another one of the run's" if marked else ", and with it the run's replay: its policies can still be played"
        )
        raise UserError(f"{path} is damaged (truncated, or not a checkpoint){hint}.") from None
    if not isinstance(state, dict) or (marked and "shoal" not in state):
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


def misfits(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What keeps one state_dict from being loaded into another, in words."""
    words = [f"{k} is missing" for k in mine if k not in theirs] + [f"{k} is not known here" for k in theirs if k not in mine]
    for k, x in mine.items():
        if k in theirs and x.shape != theirs[k].shape:
            words.append(f"{k} is {list(theirs[k].shape)} there and {list(x.shape)} here")
    return words
