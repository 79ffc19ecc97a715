"""XuanCe's IPPO and MAPPO: `agents.train(n)`, with its own settings for simple_spread brought to the common work.

A piece is one rollout with its update. Its worlds are PettingZoo's, one object a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

INSTALL = (
    ("torch==2.13.0",),
    ("--no-deps", "xuance==1.4.4", "pettingzoo==1.24.3"),  # it asks for torchvision, which would bring another torch
    ("numpy<2", "gymnasium<1.3", "scipy", "PyYAML", "tensorboard", "tqdm", "imageio", "pygame", "pyglet==1.5.15", "wandb"),
)


def refuse(work: SimpleNamespace) -> str | None:
    if len(work.hidden) < 2:
        return "xuance cuts its nets into a representation and a head: --hidden takes two widths or more."
    if work.rows * work.steps % work.minibatches:
        return f"xuance cannot cut {work.rows} x {work.steps} steps into {work.minibatches} equal minibatches."
    return None


def prepare(work: SimpleNamespace) -> tuple[dict[str, Any], Callable[[], int]]:
    import torch
    import xuance
    from xuance.common import get_arguments
    from xuance.environment import make_envs
    from xuance.torch.agents import REGISTRY_Agents

    torch.set_num_threads(work.threads or 4)
    torch.set_float32_matmul_precision("high" if work.precision == "tf32" else "highest")
    few = work.threads in (1, 2)  # with so few cores processes for the worlds make it slower
    vectors = "DummyVecMultiAgentEnv" if few else "SubprocVecMultiAgentEnv"
    wanted = {
        **{"continuous_action": False, "policy": "Categorical_MAAC_Policy", "activation": "tanh"},
        **{"representation_hidden_size": work.hidden[:-1], "actor_hidden_size": work.hidden[-1:]},
        **{"critic_hidden_size": work.hidden[-1:], "parallels": work.rows, "buffer_size": work.rows * work.steps},
        **{"n_epochs": work.epochs, "n_minibatch": work.minibatches, "vectorize": vectors},
        **{"device": "cuda:0" if work.device == "cuda" else "cpu", "render": False, "logger": "tensorboard"},
    }
    config = get_arguments(work.algo, "mpe", "simple_spread_v3", parser_args=argparse.Namespace(**wanted))
    del config.normalize  # no LayerNorm
    envs = make_envs(config)
    agents = REGISTRY_Agents[config.agent](config, envs)

    def piece() -> int:
        agents.train(work.steps)
        if work.device == "cuda":
            torch.cuda.synchronize()
        return work.steps * work.rows

    return {
        "versions": {"xuance": xuance.__version__.lstrip("v"), "torch": torch.__version__},
        "precision": work.precision,
        "threads": torch.get_num_threads(),
        "measured": f"agents.train({work.steps}) over {vectors}, one update a call, its TensorBoard log included",
        "differs": [
            "worlds are PettingZoo 1.24's in Python, one object a row",
            "Huber loss, clipped values and normalised returns, as in its own settings for this task",
        ],
    }, piece
