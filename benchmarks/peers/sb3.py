"""Stable-Baselines3's PPO over SuperSuit's rows: each agent of each world is a row of its own, and all share one policy.

That is parameter-sharing IPPO, the common way to train a team with it. A piece is one rollout with its update.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

INSTALL = (("torch==2.13.0", "stable-baselines3==2.9.2", "mpe2==1.1.1", "supersuit==3.11.0"),)


def refuse(work: SimpleNamespace) -> str | None:
    if work.algo in ("qmix", "maddpg"):
        return f"sb3 has no {work.algo.upper()}: --algo ippo."
    if work.algo != "ippo":
        return "sb3 has no central critic: --algo ippo."
    if work.rows * work.steps * 3 % work.minibatches:
        return f"sb3 cannot cut {work.rows} x {work.steps} steps of 3 agents into {work.minibatches} equal minibatches."
    return None


def prepare(work: SimpleNamespace) -> tuple[dict[str, Any], Callable[[], int]]:
    import stable_baselines3
    import supersuit
    import torch
    from mpe2 import simple_spread_v3

    torch.set_num_threads(work.threads or 4)
    torch.set_float32_matmul_precision("high" if work.precision == "tf32" else "highest")
    agents = supersuit.pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env(max_cycles=25))
    few = work.threads in (1, 2)  # with so few cores processes for the worlds make it slower
    cores = 0 if few else min(work.rows, work.threads or 8)
    rows = supersuit.concat_vec_envs_v1(agents, work.rows, num_cpus=cores, base_class="stable_baselines3")
    assert rows.num_envs == 3 * work.rows
    model = stable_baselines3.PPO(
        "MlpPolicy",
        rows,
        n_steps=work.steps,
        batch_size=3 * work.rows * work.steps // work.minibatches,
        n_epochs=work.epochs,
        ent_coef=0.01,
        learning_rate=2.5e-4,
        policy_kwargs={"net_arch": list(work.hidden), "activation_fn": torch.nn.Tanh},
        device=work.device,
    )

    def piece() -> int:
        before = model.num_timesteps
        model.learn(3 * work.rows * work.steps, reset_num_timesteps=False)
        if work.device == "cuda":
            torch.cuda.synchronize()
        return (model.num_timesteps - before) // 3  # it counts every agent's step

    where = f"{cores} processes" if cores else "its own process"
    return {
        "versions": {
            **{"stable-baselines3": stable_baselines3.__version__, "supersuit": supersuit.__version__},
            **{"torch": torch.__version__},
        },
        "precision": work.precision,
        "threads": torch.get_num_threads(),
        "measured": f"learn() of one rollout, over SuperSuit's concat_vec_envs_v1 in {where}; its steps divided by 3 agents",
        "differs": ["worlds are mpe2's in Python, one object a row", "an agent is a row: it does not know of a team"],
    }, piece
