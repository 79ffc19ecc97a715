"""Shoal's side: the loop's own collecting and updating, as `shoal bench train` measures it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

INSTALL = (("-e", str(Path(__file__).parents[2])),)


def refuse(work: SimpleNamespace) -> str | None:
    return None


def prepare(work: SimpleNamespace) -> tuple[dict[str, Any], Callable[[], int]]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
    import torch

    import shoal
    from shoal.tools.bench import TrainBench, trainer
    from shoal.training.settings import choose_device, most_compiled

    replays = hasattr(work, "batch")
    replay: dict[str, Any] = {"batch": work.batch, "every": work.every} if replays else {}
    if work.algo == "maddpg":
        replay["actions"] = "continuous"
    part = work.part if replays else "train"
    threads = work.threads or 4  # on a GPU the CPU's threads hardly matter
    options = TrainBench(
        rows=work.rows,
        rollout=work.steps,
        epochs=work.epochs,
        minibatches=work.minibatches,
        hidden=tuple(work.hidden),
        threads=threads,
        device=work.device,
        matmul=work.precision,
        normalise=False,  # the others have none
        **replay,
    )
    torch.set_num_threads(threads)
    device = choose_device(work.device)
    mode = most_compiled(device)
    piece = trainer(work.algo, "simple_spread", options, device, mode, part)
    measured = {
        "train": "collecting, advantages and updates" if not replays else "collecting, sampling and updates",
        "update": "sampling and updates from a replay that is filled",
    }
    return {
        "versions": {"shoal": shoal.__version__, "torch": torch.__version__},
        "precision": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32",
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "measured": f"{measured[part]} of the training loop, without logs, evaluations and checkpoints",
        "differs": [f"compile is {mode}, as by default here; running normalisers, which the others lack, are off"],
    }, piece
