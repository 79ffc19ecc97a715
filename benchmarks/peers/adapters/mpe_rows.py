"""Several worlds of mpe2's simple_spread as rows of arrays, for peers whose own wrapper holds one world.

A world that comes to its end is reset at once, and shows the first observation of its next episode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpe2 import simple_spread_v3


class Rows:
    def __init__(self, rows: int):
        self.worlds = [simple_spread_v3.parallel_env(max_cycles=25) for _ in range(rows)]
        self.agents: list[str] = self.worlds[0].possible_agents
        self.observation_space = self.worlds[0].observation_space(self.agents[0])
        self.action_space = self.worlds[0].action_space(self.agents[0])

    def reset(self, seed: int = 0) -> np.ndarray:
        """Observations [rows, agents, 18]."""
        return np.stack([self.stack(world.reset(seed=seed + i)[0]) for i, world in enumerate(self.worlds)])

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Actions [rows, agents] -> observations [rows, agents, 18], rewards [rows, agents], whether each world was cut off."""
        observations, rewards, over = [], [], []
        for world, chosen in zip(self.worlds, actions.tolist(), strict=True):
            seen, learner_reward, _, cut, _ = world.step(dict(zip(self.agents, chosen, strict=True)))
            over.append(cut[self.agents[0]])
            rewards.append([learner_reward[name] for name in self.agents])
            observations.append(self.stack(world.reset()[0] if over[-1] else seen))
        return np.stack(observations), np.array(rewards, np.float32), np.array(over)

    def stack(self, by_name: dict[str, Any]) -> np.ndarray:
        return np.stack([by_name[name] for name in self.agents]).astype(np.float32)
