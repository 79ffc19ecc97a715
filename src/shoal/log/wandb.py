"""Weights & Biases, where it is installed and asked for (`--log.wandb`)."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from shoal.flags import arguments, refuse_unknown
from shoal.spec import UserError

FLAGS = ("project", "entity", "group", "tags", "mode")  # arguments of wandb.init that have flags of their own
OURS = ("id", "resume", "dir", "config", "settings")  # those that are made here


def require(config: Any) -> Any:
    """The library, or a sentence that says why it cannot be used as asked."""
    try:
        import wandb
    except ImportError:
        raise UserError("--log.wandb needs Weights & Biases, which is not installed: pip install 'shoal[wandb]'.") from None
    if config.wandb_mode == "online" and not wandb.api.api_key:
        raise UserError("--log.wandb needs a key: run `wandb login`, or take --log.wandb-mode offline.")
    _try_arguments(wandb, config.wandb_args)
    return wandb


def _try_arguments(wandb: Any, text: str) -> None:
    """Refuse further arguments that wandb.init would not take."""
    given, where = arguments(text, "--log.wandb-args"), f"--log.wandb-args is {text!r}"
    for name in given:
        if name in (*FLAGS, *OURS):
            instead = f"take --log.wandb-{name}" if name in FLAGS else "it is the run's own"
            raise UserError(f"{where}, and {name!r} is not to be given there: {instead}.")
    refuse_unknown(given, wandb.init, where, (*FLAGS, *OURS))
    if given and wandb.run is None:  # else somebody's own run is under way, which would be taken for this one
        try:
            wandb.init(mode="disabled", settings=wandb.Settings(silent=True), **given).finish()
        except Exception as e:  # whatever W&B raises: of pydantic's lines the first three say what is wrong
            why = " ".join(" ".join(str(e).splitlines()[:3]).split()).partition(" [")[0].rstrip(".")
            raise UserError(f"{where}, which W&B does not take: {why}.") from e


class WandB:
    def __init__(self, config: Any, folder: Path, name: str, settings: dict[str, Any]):
        wandb = require(config)
        kept = folder / "wandb.id"  # a run that is resumed goes on under its name there
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex[:8])
        self.run = wandb.init(
            settings=wandb.Settings(silent=True),  # what a person sees is the console's
            id=kept.read_text(),
            resume="allow",
            project=config.wandb_project,
            entity=config.wandb_entity,
            group=config.wandb_group,
            tags=list(config.wandb_tags) or None,
            mode=config.wandb_mode,
            config=settings,
            dir=str(folder),
            **{"name": name, **arguments(config.wandb_args, "--log.wandb-args")},
        )

    def write(self, step: int, kind: str, metrics: dict[str, Any]) -> None:
        scalars = {f"{kind}/{k}": v for k, v in metrics.items() if isinstance(v, int | float)}
        self.run.log({**scalars, "step": step})

    def close(self) -> None:
        self.run.finish()
