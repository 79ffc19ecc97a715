"""skrl's IPPO and MAPPO under its `SequentialTrainer`.

A piece is one rollout with its update. Its own PettingZoo wrapper holds one world, so a `MultiAgentEnvWrapper` of ours
(`adapters/mpe_rows.py`) shows it several as rows, which spares it a forward pass a world.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

INSTALL = (("torch==2.13.0", "skrl==2.1.1", "mpe2==1.1.1"),)


def refuse(work: SimpleNamespace) -> str | None:
    if work.algo in ("qmix", "maddpg"):
        return f"skrl has no {work.algo.upper()}: --algo ippo or mappo."
    return "skrl's trainer takes vectors of worlds: --rows must be 2 or more." if work.rows < 2 else None


def prepare(work: SimpleNamespace) -> tuple[dict[str, Any], Callable[[], int]]:
    import gymnasium
    import skrl
    import torch
    from mpe_rows import Rows
    from skrl.envs.wrappers.torch import MultiAgentEnvWrapper
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
    from skrl.trainers.torch import SequentialTrainer

    torch.set_num_threads(work.threads or 4)
    torch.set_float32_matmul_precision("high" if work.precision == "tf32" else "highest")
    device = torch.device(work.device)
    worlds = Rows(work.rows)
    n = len(worlds.agents)
    box, central = worlds.observation_space, work.algo == "mappo"
    state_space = gymnasium.spaces.Box(-float("inf"), float("inf"), (n * box.shape[0],))
    raw = SimpleNamespace(num_envs=work.rows, num_agents=n, agents=worlds.agents, possible_agents=worlds.agents, device=device)
    raw.observation_spaces = dict.fromkeys(worlds.agents, box)
    raw.action_spaces = dict.fromkeys(worlds.agents, worlds.action_space)
    raw.state_space, raw.unwrapped = state_space, raw

    class RowsWrapper(MultiAgentEnvWrapper):
        def show(self, observations: Any) -> dict[str, Any]:
            self.seen = torch.as_tensor(observations, device=device)
            return {name: self.seen[:, i] for i, name in enumerate(worlds.agents)}

        def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
            return self.show(worlds.reset()), {}

        def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
            chosen = torch.stack([actions[name].view(-1) for name in worlds.agents], -1).long()
            observations, rewards, over = worlds.step(chosen.cpu().numpy())
            learner_reward = torch.as_tensor(rewards, device=device)
            cut = torch.as_tensor(over, device=device).view(-1, 1)
            return (
                self.show(observations),
                {name: learner_reward[:, i : i + 1] for i, name in enumerate(worlds.agents)},
                dict.fromkeys(worlds.agents, torch.zeros_like(cut)),
                dict.fromkeys(worlds.agents, cut),
                {},
            )

        def state(self) -> dict[str, Any]:
            return dict.fromkeys(worlds.agents, self.seen.flatten(1))

        def render(self, *args: Any, **kwargs: Any) -> None:
            pass

        def close(self) -> None:
            pass

    def net(inputs: int, outputs: int) -> torch.nn.Sequential:
        layers: list[torch.nn.Module] = []
        for width in work.hidden:
            layers += [torch.nn.Linear(inputs, width), torch.nn.Tanh()]
            inputs = width
        return torch.nn.Sequential(*layers, torch.nn.Linear(inputs, outputs))

    class Policy(CategoricalMixin, Model):
        def __init__(self) -> None:
            Model.__init__(
                self, observation_space=box, state_space=state_space, action_space=worlds.action_space, device=device
            )
            CategoricalMixin.__init__(self)
            self.net = net(box.shape[0], int(worlds.action_space.n))

        def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[Any, dict[str, Any]]:
            return self.net(inputs["observations"]), {}

    class Value(DeterministicMixin, Model):
        def __init__(self) -> None:
            Model.__init__(
                self, observation_space=box, state_space=state_space, action_space=worlds.action_space, device=device
            )
            DeterministicMixin.__init__(self)
            self.net = net(state_space.shape[0] if central else box.shape[0], 1)

        def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[Any, dict[str, Any]]:
            return self.net(inputs["states" if central else "observations"]), {}

    if central:
        from skrl.multi_agents.torch import mappo

        algorithm, settings = mappo.MAPPO, mappo.MAPPO_CFG
    else:
        from skrl.multi_agents.torch import ippo

        algorithm, settings = ippo.IPPO, ippo.IPPO_CFG

    env = RowsWrapper(raw)
    no_words = {key: {} for key in worlds.agents}  # its own default, {}, is refused as a dictionary without the agents
    config = settings(
        learning_rate_scheduler_kwargs=no_words,
        observation_preprocessor_kwargs=no_words,
        state_preprocessor_kwargs=no_words,
        value_preprocessor_kwargs=no_words,
        rollouts=work.steps,
        learning_epochs=work.epochs,
        mini_batches=work.minibatches,
        entropy_loss_scale=0.01,
        experiment={"directory": os.getcwd(), "write_interval": 0, "checkpoint_interval": 0},
    )
    agents = algorithm(
        possible_agents=env.possible_agents,
        models={name: {"policy": Policy(), "value": Value()} for name in env.possible_agents},
        memories={n: RandomMemory(memory_size=work.steps, num_envs=work.rows, device=device) for n in env.possible_agents},
        observation_spaces=env.observation_spaces,
        state_spaces=env.state_spaces,
        action_spaces=env.action_spaces,
        device=device,
        cfg=config,
    )
    schedule = {"timesteps": work.steps, "headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    trainer = SequentialTrainer(env=env, agents=agents, cfg=schedule)

    def piece() -> int:
        trainer.train()
        if work.device == "cuda":
            torch.cuda.synchronize()
        return work.steps * work.rows

    return {
        "versions": {"skrl": skrl.__version__, "torch": torch.__version__},
        "precision": work.precision,
        "threads": torch.get_num_threads(),
        "measured": f"SequentialTrainer.train() of {work.steps} timesteps, one update a call, logs and checkpoints off",
        "differs": [
            "worlds are mpe2's in Python, one object a row, reset at the beginning of a call",
            "each agent has nets, a memory and an optimiser of its own, updated one after another",
        ],
    }, piece
