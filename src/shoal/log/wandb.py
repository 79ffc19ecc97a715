"""Weights & Biases, where it is installed and asked for (`--log.wandb`)."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from shoal.spec import UserError


def require(config: Any) -> Any:
    """The library, or a sentence that says why it cannot be used."""
    try:
        import wandb
    except ImportError:
        raise UserError("--log.wandb needs Weights & Biases, which is not installed: pip install 'shoal[wandb]'.") from None
    if config.wandb_mode == "online" and not wandb.api.api_key:
        raise UserError("--log.wandb needs a key: run `wandb login`, or take --log.wandb-mode offline.")
    return wandb


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
            name=name,
            config=settings,
            dir=str(folder),
        )

    def write(self, step: int, kind: str, metrics: dict[str, Any]) -> None:
        scalars = {f"{kind}/{k}": v for k, v in metrics.items() if isinstance(v, int | float)}
        self.run.log({**scalars, "step": step})

    def close(self) -> None:
        self.run.finish()
