"""An environment of your own: two workers in a corridor of lamps, each of whom lights the lamps it walks past; dark again soon.

From the command line, and from Python (`python examples/lamps.py`):

    shoal check examples/lamps.py
    shoal train ippo examples/lamps.py --steps 200k --env.args length=12
"""

import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv


class Lamps(ParallelEnv):
    metadata = {"name": "lamps", "render_modes": []}

    def __init__(self, length=8, burns=6, horizon=40):
        self.possible_agents = ["worker_0", "worker_1"]
        self.length, self.burns, self.horizon = length, burns, horizon

    def observation_space(self, agent):  # how long each lamp still burns, where I am, where the other is
        return Box(0, 1, (3 * self.length,), np.float32)

    def action_space(self, agent):  # left, stay, right
        return Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents, self.clock = list(self.possible_agents), 0
        self.lamps = np.zeros(self.length)
        self.at = np.random.default_rng(seed).integers(self.length, size=2)
        return self.seen(), {a: {} for a in self.agents}

    def step(self, actions):
        moves = np.array([actions[a] - 1 for a in self.agents])
        self.at, self.clock = np.clip(self.at + moves, 0, self.length - 1), self.clock + 1
        self.lamps = np.maximum(self.lamps - 1 / self.burns, 0)
        self.lamps[self.at] = 1
        seen, light = self.seen(), float((self.lamps > 0).mean())
        out = dict.fromkeys(self.agents, self.clock >= self.horizon)
        rewards, never, infos = dict.fromkeys(out, light), dict.fromkeys(out, False), {a: {} for a in out}
        self.agents = [] if self.clock >= self.horizon else self.agents
        return seen, rewards, never, out, infos  # truncated and never terminated: there is a value after the end

    def seen(self):
        here = np.eye(self.length)[self.at]
        return {a: np.concatenate((self.lamps, here[i], here[1 - i])).astype(np.float32) for i, a in enumerate(self.agents)}


if __name__ == "__main__":
    import shoal

    run = shoal.train("ippo", __file__, steps=100_000, envs=32, env={"args": "length=12"}, algo={"lr": 1e-3})
    first, *_, last = (e["return/agents"] for e in run.evaluations())
    print(f"light in 40 steps: {last:.1f} (begun with {first:.1f})")

    policy, world = shoal.load(run), Lamps(length=12)
    observations, _ = world.reset(seed=7)
    memory, light = None, 0.0
    while world.agents:
        actions, memory = policy.act(observations, memory)
        observations, rewards, *_ = world.step(actions)
        light += rewards["worker_0"]
    print(f"one episode by hand: {light:.1f}")
