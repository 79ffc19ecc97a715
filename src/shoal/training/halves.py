"""Collecting from a world in other processes, in halves of its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.buffers.rollout import RolloutBuffer
from shoal.envs.base import Environment
from shoal.spec import Batch, NotFiniteError
from shoal.training.collect import Collector, Players, to_space
from shoal.tree import tree_map


class HalvesCollector(Collector):
    """Of a world in other processes: one half of the rows is acted for while the other is stepped elsewhere."""

    def __init__(self, env: Environment, players: Players, generator: torch.Generator):
        super().__init__(env, players, generator)
        self.buffers = [RolloutBuffer() for _ in env.halves]

    def collect(self, steps: int) -> Batch:
        env: Any = self.env
        mark = self.frame, self.memory, self.generator.get_state(), env.mark()
        try:
            return super().collect(steps)
        except NotFiniteError:  # as if this rollout had not begun: what is saved now is good
            self.frame, self.memory, generator, rows = mark
            self.generator.set_state(generator)
            env.rewind(rows)
            raise

    def _steps(self, steps: int, noise: dict[str, Tensor], world_noise: Tensor) -> Batch:
        env: Any = self.env
        frames = [tree_map(lambda x, half=half: x[half], self.frame) for half in env.halves]
        memories = [tree_map(lambda x, half=half: x[half], self.memory) for half in env.halves]
        acted: list[Any] = [None] * len(frames)  # what each half does in the step that is under way

        def act(k: int, t: int) -> None:
            half = env.halves[k]
            acted[k] = self.players.act(frames[k], memories[k], {g: x[t, half] for g, x in noise.items()}, explore=True)
            actions = {g.name: to_space(g.action, acted[k].actions[g.name]) for g in env.spec.groups}
            env.send(k, actions, world_noise[t, half])

        for k in range(len(frames)):
            act(k, 0)
        for t in range(steps):
            for k, buffer in enumerate(self.buffers):
                outcome = env.receive(k)
                buffer.put(self._record(frames[k], memories[k], acted[k], outcome))
                frames[k], memories[k] = outcome.frame, acted[k].memory
                if t + 1 < steps:
                    act(k, t + 1)
        self.frame, self.memory = joined(frames, 0), joined(memories, 0)
        return joined([buffer.take() for buffer in self.buffers], 1)


def make_collector(env: Environment, players: Players, generator: torch.Generator) -> Collector:
    return (HalvesCollector if env.halves else Collector)(env, players, generator)


def joined(halves: list[Any], rows_at: int) -> Any:
    """Trees of some rows each as one of all rows."""
    return halves[0] if len(halves) == 1 else tree_map(lambda *xs: torch.cat(xs, rows_at), *halves)
