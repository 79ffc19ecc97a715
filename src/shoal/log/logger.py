"""The logger: the only place where a tensor becomes a number.

metrics.jsonl is the truth that every tool reads, one object a line; the sinks beside it are copies for other eyes. What
has been written can be cut back to a mark, which is how a resumed run's logs equal those of one that never stopped.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from shoal import files
from shoal.flags import arguments
from shoal.spec import UserError


@dataclass(frozen=True)
class LogConfig:
    every: Literal["auto"] | int = "auto"  # environment steps between lines of training metrics; auto: 100 lines a run
    agents: bool = False  # metrics of learning by agent as well, <group>/<i>/<metric>: those that are means over agents
    tensorboard: bool = True  # write TensorBoard events into tb/
    csv: bool = True  # write metrics.csv, made anew of metrics.jsonl at every checkpoint
    wandb: bool = False  # send to Weights & Biases; needs `pip install shoal[wandb]`
    wandb_project: str = "shoal"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    wandb_group: str | None = None  # W&B group of runs
    wandb_tags: tuple[str, ...] = ()  # W&B tags, with commas between
    wandb_mode: Literal["online", "offline", "disabled"] = "online"  # whether W&B's server is asked
    wandb_args: str = ""  # further arguments of wandb.init: name=value,name=value

    def __post_init__(self) -> None:
        if self.every != "auto" and self.every < 1:
            raise UserError(f"--log.every is {self.every}: it is a number of steps, at least 1.")
        arguments(self.wandb_args, "--log.wandb-args")


KINDS = ("train", "eval", "remark")  # of the lines of metrics.jsonl


class Sink(Protocol):
    def write(self, step: int, kind: str, metrics: dict[str, float | list[float]]) -> None: ...
    def close(self) -> None: ...


class Logger:
    """Takes metrics as tensors, hands them on as numbers."""

    def __init__(self, folder: Path, config: LogConfig, name: str, settings: dict[str, Any], resumed_at: int | None = None):
        self.folder, self.config = folder, config
        self.jsonl = (folder / "metrics.jsonl").open("a")
        self.text = (folder / "train.log").open("a")
        self.sinks: list[Sink] = []
        if config.tensorboard:
            from shoal.log.tensorboard import TensorBoard

            self.sinks.append(TensorBoard(folder / "tb", resumed_at))
        if config.wandb:
            from shoal.log.wandb import WandB

            self.sinks.append(WandB(config, folder, name, settings))

    def write(self, step: int, time: float, kind: str, metrics: dict[str, Tensor]) -> dict[str, Any]:
        numbers = to_numbers(metrics)
        self._append({"step": step, "time": round(time, 3), "kind": kind, **numbers})
        for sink in self.sinks:
            sink.write(step, kind, numbers)
        return numbers

    def remark(self, step: int, time: float, about: str, sentence: str) -> None:
        """A sentence about the run that those who read it later are to see: `read_remarks`."""
        self._append({"step": step, "time": round(time, 3), "kind": "remark", "about": about, "sentence": sentence})

    def _append(self, line: dict[str, Any]) -> None:
        if not os.fstat(self.jsonl.fileno()).st_nlink:
            raise FileNotFoundError(f"{self.folder / 'metrics.jsonl'} was deleted")
        self.jsonl.write(json.dumps(line) + "\n")
        self.jsonl.flush()

    def say(self, text: str) -> None:
        """A line of train.log, for people."""
        self.text.write(text + "\n")
        self.text.flush()

    def mark(self) -> dict[str, int]:
        """How long the logs are now, on the disk."""
        for f in (self.jsonl, self.text):
            os.fsync(f.fileno())
        return {"metrics.jsonl": self.jsonl.tell(), "train.log": self.text.tell()}

    def refresh(self) -> None:
        if self.config.csv:
            write_csv(self.folder)

    def close(self) -> None:
        if self.folder.is_dir():  # else somebody deleted it
            self.refresh()
        self.jsonl.close()
        self.text.close()
        for sink in self.sinks:
            sink.close()


def to_numbers(metrics: dict[str, Tensor]) -> dict[str, Any]:
    """All tensors in one trip from the device. Vectors become lists; what is not finite becomes none, which JSON has."""
    tensors = {k: v.detach() if isinstance(v, Tensor) else torch.as_tensor(v) for k, v in metrics.items()}
    if not tensors:
        return {}
    device = next((t.device for t in tensors.values() if t.device.type != "cpu"), torch.device("cpu"))
    whole = torch.cat([t.reshape(-1).to(device, torch.float64) for t in tensors.values()]).tolist()
    out: dict[str, Any] = {}
    at = 0
    for k, t in tensors.items():
        values = [x if math.isfinite(x) else None for x in whole[at : at + t.numel()]]
        out[k] = values if t.dim() else values[0]
        at += t.numel()
    return out


def cut(folder: Path, mark: dict[str, int]) -> None:
    """Cut the logs back to a mark."""
    for name, size in mark.items():
        path = folder / name
        if path.exists() and path.stat().st_size > size:
            with path.open("r+b") as f:
                f.truncate(size)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every line of metrics, of training and of evaluations."""
    return [line for line in _read_lines(folder) if line["kind"] != "remark"]


def read_remarks(folder: Path) -> list[dict[str, Any]]:
    """What the run had to say of itself: lines with `step`, what they are `about`, and a `sentence`."""
    lines = [line for line in _read_lines(folder) if line["kind"] == "remark"]
    return [line for line in lines if isinstance(line.get("about"), str) and isinstance(line.get("sentence"), str)]


def _read_lines(folder: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl up to the first that is none: a last one may have been cut short by a crash."""
    path = Path(folder) / "metrics.jsonl"
    lines = []
    for line in files.read_text(path, "replace").splitlines() if path.exists() else []:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not (isinstance(value, dict) and is_number(value.get("step")) and value.get("kind") in KINDS):
            break
        lines.append(value)
    return lines


def is_number(x: Any) -> bool:
    """Whether a value of JSON's is one that can be plotted and compared."""
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


def write_csv(folder: Path) -> None:
    lines = read_metrics(folder)
    columns = list(dict.fromkeys(k for line in lines for k, v in line.items() if not isinstance(v, list)))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(lines)
    files.write_text(folder / "metrics.csv", text.getvalue())
