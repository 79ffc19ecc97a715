"""The Python API: what the command line does, as functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.envs.base import Environment
from shoal.spec import Frame, UserError, View
from shoal.training.collect import Players, to_space
from shoal.training.evaluate import Episodes, rows_for
from shoal.training.evaluate import evaluate as play_episodes
from shoal.training.loop import Hook, Loop
from shoal.training.loop import resume as resume_loop
from shoal.training.players import frozen_players
from shoal.training.run import Run
from shoal.training.settings import Settings, choose_device, make_env, resolve


def make(env: str, rows: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32, **config: Any) -> Environment:
    """An environment by id or path, with its own settings as keywords."""
    if rows < 1:
        raise UserError(f"rows is {rows}: a world has at least one.")
    return make_env(env, rows, choose_device(device), dtype, **config)


def train(
    algorithm: str,
    environment: str,
    /,
    *,
    algo: dict[str, Any] | None = None,
    net: dict[str, Any] | None = None,
    env: dict[str, Any] | None = None,
    eval: dict[str, Any] | None = None,
    save: dict[str, Any] | None = None,
    log: dict[str, Any] | None = None,
    groups: dict[str, dict[str, dict[str, Any]]] | None = None,
    team: dict[str, str] | None = None,
    hook: Hook | None = None,
    **run: Any,
) -> Run:
    """Train, and return the run. Keywords are the flags: steps=..., algo=dict(lr=...), team=dict(adversary="random")."""
    sections = {"algo": algo, "net": net, "env": env, "eval": eval, "save": save, "log": log}
    run = {k: str(v) if isinstance(v, Path) else v for k, v in run.items()}
    settings = Settings(algorithm, environment, run, {k: dict(v) for k, v in sections.items() if v}, groups or {}, team or {})
    return start(settings, hook)[0]


def start(settings: Settings, hook: Hook | None = None) -> tuple[Run, Loop]:
    """Check everything, and only then make the run's folder; train."""
    resolved = resolve(settings)
    loop = Loop(resolved, hook=hook)
    loop.folder = Run.create(resolved)
    loop.run()
    return loop.folder, loop


def resume(run: str | Path | Run, steps: int | None = None, hook: Hook | None = None, quiet: bool | None = None) -> Run:
    """Go on with a run from its last checkpoint, as if it had never stopped; `steps` sets a new total."""
    loop = resume_loop(run.path if isinstance(run, Run) else run, steps, hook, quiet)
    loop.run()
    return loop.folder


def evaluate(
    run: str | Path | Run,
    episodes: int = 100,
    sampled: bool = False,
    seed: int | None = None,
    checkpoint: str = "auto",
    team: dict[str, str] | None = None,
    device: str = "cpu",
) -> Episodes:
    """Play a run's policies, greedily or sampled, on fresh seeds. `team` sets who plays a group or team instead."""
    if episodes < 1:
        raise UserError(f"--episodes is {episodes}: it must be at least 1.")
    run = run if isinstance(run, Run) else Run(run)
    resolved = run.resolve()
    torch.set_num_threads(resolved.run.threads)
    rows, each = rows_for(episodes)
    env = resolved.make_env(rows, choose_device(device))
    players = frozen_players(run, env.spec, env.device, checkpoint, team or {})
    return play_episodes(env, players, each, (resolved.run.seed if seed is None else seed) + 1_000_003, sampled)


def load(run: str | Path | Run, checkpoint: str = "auto", device: str = "cpu") -> Policy:
    """What a run learnt, ready to act."""
    run = run if isinstance(run, Run) else Run(run)
    spec = run.resolve().make_env(1, choose_device(device)).spec
    return Policy(frozen_players(run, spec, choose_device(device), checkpoint, {}), choose_device(device))


class Policy:
    """Acts for every agent of a world, by agent name, as a PettingZoo loop has them."""

    def __init__(self, players: Players, device: torch.device):
        self.players, self.spec, self.device = players, players.spec, device

    @torch.no_grad()
    def act(
        self, observations: dict[str, Any], memory: Any = None, masks: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], Any]:
        """Greedy actions for the agents that `observations` names, in the space's own units, and the memory to pass
        back in. Begin an episode with memory none. `masks` are the legal actions, where the world has such."""
        first = memory is None
        memory = self.players.memory(1, self.device) if first else memory
        known = {name for g in self.spec.groups for name in g.agents}
        for name in observations:
            if name not in known:
                raise UserError(f"there is no agent {name!r}: this policy plays {', '.join(sorted(known))}.")
        frame = Frame({g.name: self._view(g, observations, masks or {}, first) for g in self.spec.groups})
        generator = torch.Generator(device=self.device).manual_seed(0)
        chosen, memory, _ = self.players.act(frame, memory, self.players.noise(generator, 1), explore=False, greedy=True)
        actions = {}
        for g in self.spec.groups:
            values = to_space(g.action, chosen[g.name])[0].cpu().numpy()
            for name, a in zip(g.agents, values, strict=True):
                if name in observations:
                    actions[name] = int(a) if g.action.shape == () else a
        return actions, memory

    def _view(self, g: Any, observations: dict[str, Any], masks: dict[str, Any], first: bool) -> View:
        blank = np.zeros(g.obs, np.float32)
        obs = torch.as_tensor(np.stack([np.asarray(observations.get(a, blank)) for a in g.agents]), device=self.device)
        if tuple(obs.shape[1:]) != g.obs:
            raise UserError(f"an observation of {g.name!r} has shape {tuple(obs.shape[1:])}; this policy takes {g.obs}.")
        alive = torch.tensor([[a in observations for a in g.agents]], device=self.device)
        legal = None
        if any(a in masks for a in g.agents):
            ones = np.ones(sum(g.action.sizes), bool)
            legal = torch.as_tensor(np.stack([np.asarray(masks.get(a, ones), bool) for a in g.agents]), device=self.device)[
                None
            ]
        return View(obs[None], alive, alive, torch.full_like(alive, first), legal)
