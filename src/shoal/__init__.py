"""Shoal trains, measures, watches and ships teams of reinforcement-learning agents.

import shoal
run = shoal.train("mappo", "simple_spread", steps=2_000_000, seed=0)
policy = shoal.load(run.path)
actions, memory = policy.act(observations, memory)
"""

from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "make": "shoal.api",
    "train": "shoal.api",
    "resume": "shoal.api",
    "evaluate": "shoal.api",
    "load": "shoal.api",
    "learner": "shoal.training.foreign",
    "samples": "shoal.training.foreign",
    "check": "shoal.api",
    "Policy": "shoal.policy",
    "Hook": "shoal.training.hooks",
    "Run": "shoal.training.run",
    "UserError": "shoal.spec",
}
__all__ = ["Hook", "Policy", "Run", "UserError", "check", "evaluate", "learner", "load", "make", "resume", "samples", "train"]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are asked for: `import shoal` loads no torch."""
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
