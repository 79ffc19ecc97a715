"""XuanCe's IPPO, MAPPO, QMIX and MADDPG: `agents.train(n)`, its own settings for simple_spread brought to the common work.

A piece is one rollout with its update; with a replay, as many whole rounds of steps and updates as make about `--steps` steps,
or updates alone. Its worlds are PettingZoo's, one object a row.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

INSTALL = (
    ("torch==2.13.0",),
    ("--no-deps", "xuance==1.4.4", "pettingzoo==1.24.3"),  # it asks for torchvision, which would bring another torch
    ("numpy<2", "gymnasium<1.3", "scipy", "PyYAML", "tensorboard", "tqdm", "imageio", "pygame", "pyglet==1.5.15", "wandb"),
)
CAPACITY = 100_000  # transitions that a replay holds
START = 1_000  # steps before its first update
FILL = 10_000  # steps in the replay before updates alone are measured
UPDATES = 20  # in a piece of updates alone
DIFFERS = {
    "qmix": [
        "ids join before the last hidden layer; each weight of the mixer and its last bias have hyper-nets with 64 hidden",
        "Adam's rate falls linearly to half, nets are copied to their targets each 100 updates, as in its own settings",
    ],
    "maddpg": [
        "one critic with ids for all agents, and others' actions in the actor's loss from the same policy, with gradients",
        "Adam's rates fall linearly, as in its own settings",
    ],
}


def refuse(work: SimpleNamespace) -> str | None:
    if len(work.hidden) < 2:
        return "xuance cuts its nets into a representation and a head: --hidden takes two widths or more."
    if not hasattr(work, "batch") and work.rows * work.steps % work.minibatches:
        return f"xuance cannot cut {work.rows} x {work.steps} steps into {work.minibatches} equal minibatches."
    return None


def round_of(rows: int, every: int) -> tuple[int, int]:
    """Environment steps and updates of a round: the shortest with an update each `every` steps.

    It updates where its count of steps, which grows by `rows` at a time, is a multiple of `training_frequency`. With 16 rows
    and 25 that is each 400 steps, not each 25: so it does 16 updates there.
    """
    steps = math.lcm(rows, every)
    return steps, steps // every


def on_policy(work: SimpleNamespace) -> dict[str, Any]:
    return {
        **{"continuous_action": False, "policy": "Categorical_MAAC_Policy", "activation": "tanh"},
        **{"representation_hidden_size": work.hidden[:-1], "actor_hidden_size": work.hidden[-1:]},
        **{"critic_hidden_size": work.hidden[-1:], "parallels": work.rows, "buffer_size": work.rows * work.steps},
        **{"n_epochs": work.epochs, "n_minibatch": work.minibatches},
    }


def off_policy(work: SimpleNamespace) -> dict[str, Any]:
    frequency, updates = round_of(work.rows, work.every)
    nets = {
        **{"continuous_action": False, "policy": "Mixing_Q_network", "use_rnn": False},
        **{"representation_hidden_size": work.hidden[:-1], "q_hidden_size": work.hidden[-1:]},
        **{"hidden_dim_mixing_net": 32, "hidden_dim_hyper_net": 64, "double_q": True},
    }
    if work.algo == "maddpg":
        nets = {"continuous_action": True, "actor_hidden_size": work.hidden, "critic_hidden_size": work.hidden}
    return {
        **nets,
        **{"activation": "relu", "use_parameter_sharing": True},
        **{"parallels": work.rows, "buffer_size": CAPACITY // work.rows * work.rows, "batch_size": work.batch},  # whole rows
        **{"start_training": START, "training_frequency": frequency, "n_epochs": updates},
        **{"use_grad_clip": True, "grad_clip_norm": 10.0},  # off in its own settings
    }


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
    replays = hasattr(work, "batch")
    wanted = {
        **(off_policy(work) if replays else on_policy(work)),
        **{"vectorize": vectors, "render": False, "logger": "tensorboard"},
        "device": "cuda:0" if work.device == "cuda" else "cpu",
    }
    config = get_arguments(work.algo, "mpe", "simple_spread_v3", parser_args=argparse.Namespace(**wanted))
    vars(config).pop("normalize", None)  # no LayerNorm
    envs = make_envs(config)
    agents = REGISTRY_Agents[config.agent](config, envs)

    turns = work.steps
    measured = f"agents.train({turns}) over {vectors}, one update a call, its TensorBoard log included"
    differs = ["Huber loss, clipped values and normalised returns, as in its own settings for this task"]
    alone = replays and work.part == "update"
    if replays:
        steps, times = round_of(work.rows, work.every)
        turns = math.ceil(work.steps * work.rows / steps) * steps // work.rows
        measured = f"agents.train({turns}) over {vectors}, {times} updates each {steps} steps, its TensorBoard log included"
        differs = DIFFERS[work.algo]
        agents.train(math.ceil((FILL if alone else START) / work.rows))
    if alone:
        filled = agents.memory.size * work.rows
        measured = f"agents.train_epochs({UPDATES}), sampling included, from a replay of {filled} transitions"

    def piece() -> int:
        if alone:
            agents.train_epochs(UPDATES)
        else:
            agents.train(turns)
        if work.device == "cuda":
            torch.cuda.synchronize()
        return UPDATES if alone else turns * work.rows

    return {
        "versions": {"xuance": xuance.__version__.lstrip("v"), "torch": torch.__version__},
        "precision": work.precision,
        "threads": torch.get_num_threads(),
        "measured": measured,
        "differs": ["worlds are PettingZoo 1.24's in Python, one object a row", *differs],
    }, piece
