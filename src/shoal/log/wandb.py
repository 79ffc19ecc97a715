"""Weights & Biases, where it is installed and asked for (`--log.wandb`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.spec import UserError


def require() -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError("--log.wandb needs Weights & Biases, which is not installed: pip install 'shoal[wandb]'.") from None
    return wandb


class WandB:
    def __init__(self, config: Any, folder: Path, name: str, settings: dict[str, Any]):
        wandb = require()
        self.run = wandb.init(
            settings=wandb.Settings(silent=True),  # what a person sees is the console's
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
