"""BenchMARL's IPPO and MAPPO: an `Experiment` under way, on VMAS's simple_spread, its vectorised port of the same world.

A piece is an iteration: from one batch collected to the next. `Experiment.run` goes to its end and closes, so it runs in a
thread, and a callback of ours holds it between pieces.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

INSTALL = (
    ("torch==2.13.0", "tensordict==0.11.0", "torchrl==0.11.1", "vmas==1.5.2", "hydra-core", "omegaconf", "tqdm"),
    ("--no-deps", "benchmarl==1.5.2"),  # it asks for torchvision, which would bring another torch
)


def refuse(work: SimpleNamespace) -> str | None:
    if work.algo in ("qmix", "maddpg"):
        return f"benchmarl's {work.algo.upper()} is not compared here: --algo ippo or mappo."
    if work.rows * work.steps % work.minibatches:
        return f"benchmarl cannot cut {work.rows} x {work.steps} steps into {work.minibatches} equal minibatches."
    return None


def prepare(work: SimpleNamespace) -> tuple[dict[str, Any], Callable[[], int]]:
    import torch
    from benchmarl.algorithms import IppoConfig, MappoConfig
    from benchmarl.environments import VmasTask
    from benchmarl.experiment import Callback, Experiment, ExperimentConfig
    from benchmarl.models.mlp import MlpConfig

    torch.set_num_threads(work.threads or 4)
    torch.set_float32_matmul_precision("high" if work.precision == "tf32" else "highest")
    config = ExperimentConfig.get_from_yaml()
    config.sampling_device = config.train_device = config.buffer_device = work.device
    config.prefer_continuous_actions = False
    config.on_policy_collected_frames_per_batch = work.rows * work.steps
    config.on_policy_n_envs_per_worker = work.rows
    config.on_policy_n_minibatch_iters = work.epochs
    config.on_policy_minibatch_size = work.rows * work.steps // work.minibatches
    config.max_n_iters, config.max_n_frames = 1_000_000_000, None
    config.evaluation = config.render = config.create_json = False
    config.loggers, config.save_folder = [], os.getcwd()

    task = VmasTask.SIMPLE_SPREAD.get_from_yaml()
    task.config = {**task.config, "max_steps": 25, "n_agents": 3}
    model = MlpConfig(num_cells=list(work.hidden), layer_class=torch.nn.Linear, activation_class=torch.nn.Tanh)

    class Gate(Callback):  # type: ignore[misc]
        """Stops the experiment after each batch, until `go`."""

        def __init__(self) -> None:
            super().__init__()
            self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
            self.failure: BaseException | None = None

        def __reduce__(self) -> tuple[Any, ...]:
            return object, ()  # an experiment pickles its callbacks beside its settings, and locks cannot be

        def on_batch_collected(self, batch: Any) -> None:
            if work.device == "cuda":
                torch.cuda.synchronize()
            self.done.release()
            self.go.acquire()

    gate = Gate()
    algorithm = (MappoConfig if work.algo == "mappo" else IppoConfig).get_from_yaml()
    algorithm.entropy_coef = 0.01
    experiment = Experiment(task=task, algorithm_config=algorithm, model_config=model, seed=0, config=config, callbacks=[gate])

    def run() -> None:
        torch.set_num_threads(work.threads or 4)
        try:
            experiment.run()
        except BaseException as e:
            gate.failure = e
        gate.done.release()

    threading.Thread(target=run, daemon=True).start()
    gate.done.acquire()

    def piece() -> int:
        gate.go.release()
        gate.done.acquire()
        if gate.failure is not None:
            raise gate.failure
        return work.rows * work.steps

    piece()
    from importlib import metadata

    names = ("benchmarl", "torchrl", "tensordict", "vmas", "torch")
    actions = experiment.action_spec["agents", "action"].space.n
    return {
        "versions": {name: metadata.version(name) for name in names},
        "precision": work.precision,
        "threads": torch.get_num_threads(),
        "measured": "iterations of Experiment.run(), its metrics included; evaluations and loggers off",
        "differs": [
            f"the world is VMAS's simple_spread, batched in PyTorch: another engine, {actions} discrete actions instead of 5",
            "loss of actor and critic are stepped by two optimisers; the collector, buffer and loss are torchrl's",
        ],
    }, piece
