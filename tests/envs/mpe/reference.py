"""mpe2 beside our worlds: fed with the same draws, read out in our state's terms."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.envs.mpe.world import Scenario

Array = NDArray[np.float64]

AGENTS = {  # id -> agents, by default
    "collect_treasure": 8,
    "simple": 1,
    "simple_adversary": 3,
    "simple_crypto": 3,
    "simple_formation": 4,
    "simple_line": 4,
    "simple_push": 2,
    "simple_reference": 2,
    "simple_speaker_listener": 2,
    "simple_spread": 3,
    "simple_tag": 4,
    "simple_world_comm": 6,
}
SORTED = ("agent_neighbors", "landmark_neighbors")
THEIRS = {"n": "N", **{x: f"num_{x}" for x in SORTED}}  # our setting -> theirs, where the names differ


def make(name: str, rows: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Scenario:
    module = importlib.import_module(f"shoal.envs.mpe.{name}")
    cls = getattr(module, "".join(x.title() for x in name.split("_")))
    return cls(cls.Config(**settings), rows, dtype=dtype)  # type: ignore[no-any-return]


def random_actions(world: Scenario, gen: torch.Generator) -> dict[str, torch.Tensor]:
    out = {}
    for g in world.spec.groups:
        shape = (world.rows, g.n)
        if g.action.kind == "continuous":
            out[g.name] = torch.rand(*shape, *g.action.shape, generator=gen, dtype=torch.float64)
        else:
            choices = [torch.randint(k, shape, generator=gen) for k in g.action.sizes]
            out[g.name] = choices[0] if g.action.kind == "discrete" else torch.stack(choices, -1)
    return out


class Recording:
    """Stands in for a numpy generator and hands out given uniform numbers, in order."""

    def __init__(self, numbers: Any):
        self.numbers, self.used = [float(x) for x in numbers], 0

    def take(self) -> float:
        self.used += 1
        return self.numbers[self.used - 1]

    def uniform(self, low: float = 0.0, high: float = 1.0, size: int | None = None) -> Any:
        draw = [low + (high - low) * self.take() for _ in range(size or 1)]
        return draw[0] if size is None else np.array(draw)

    def integers(self, low: int, high: int | None = None) -> int:
        low, high = (0, low) if high is None else (low, high)
        return low + int(self.take() * (high - low))

    def __deepcopy__(self, memo: Any) -> Recording:  # collect_treasure copies its generator
        return self


class Reference:
    """One mpe2 environment."""

    def __init__(self, name: str, actions: str = "discrete", **settings: Any):
        module = importlib.import_module(f"mpe2.{name}.{name}")
        settings = {THEIRS.get(k, k): v for k, v in settings.items()}
        self.name = name
        self.env = module.raw_env(continuous_actions=actions == "continuous", **settings)
        self.world, self.scenario, self.agents = self.env.world, self.env.scenario, self.env.world.agents
        # mpe2 1.1.1: a property of the base class swallows the stage, which so stays 0 for ever; an attribute hides it
        theirs = type(self.scenario)
        self.scenario.__class__ = type("Staged", (theirs,), {"curriculum_stage": 0})

    def reset(self, noise: Array) -> None:
        numbers = list(noise)
        if self.name == "simple_world_comm":  # it draws food and forests twice and keeps the second
            again = 2 * (len(self.world.food) + len(self.world.forests))
            numbers[len(numbers) - again : len(numbers) - again] = [0.123] * again
        tape = self.env.np_random = Recording(numbers)
        self.env.reset()
        assert tape.used == len(tape.numbers)

    def step(self, actions: list[Any], noise: Array) -> None:
        """Actions in the order of agents. noise: what our world takes for a step (not for a start)."""
        if self.name == "collect_treasure":
            tape = self.world.np_random = Recording(
                x
                for landmark, fresh in zip(self.world.landmarks, noise.reshape(-1, 3), strict=True)
                if not landmark.alive
                for x in (0.5, *fresh)  # whether to come back at all: always
            )
        for action in actions:
            self.env.step(action)
        assert self.name != "collect_treasure" or tape.used == len(tape.numbers)

    def observe(self) -> list[Array]:
        return [self.scenario.observation(a, self.world) for a in self.agents]

    def rewards(self) -> Array:
        return np.array([self.env.rewards[a.name] for a in self.agents])

    def terminated(self) -> Array:
        return np.array([self.env.terminations[a.name] for a in self.agents])

    def truncated(self) -> Array:
        return np.array([self.env.truncations[a.name] for a in self.agents])

    def read(self) -> dict[str, Any]:
        """A row of our state."""
        w, agents, marks = self.world, self.agents, self.world.landmarks
        state = {"pos": [e.state.p_pos for e in w.entities], "vel": [a.state.p_vel for a in agents], "clock": self.env.steps}
        if not all(a.silent for a in agents):
            state["comm"] = [a.state.c for a in agents]
        if self.name in ("simple_adversary", "simple_push", "simple_crypto"):
            state["goal"] = [marks.index(agents[0].goal_a)]
        if self.name == "simple_crypto":
            state["goal"].append(int(np.argmax(agents[2].key)))
        if self.name == "simple_reference":
            state["goal"] = [marks.index(a.goal_b) for a in agents]
        if self.name == "simple_speaker_listener":
            state["goal"] = [marks.index(agents[0].goal_b)]
        if self.name == "simple_tag" and self.scenario.curriculum:
            state["pace"] = agents[-1].max_speed / 1.3
        if self.name == "collect_treasure":
            collectors = [a for a in agents if a.collector]
            state["held"] = [-1 if a.holding is None else a.holding for a in collectors]
            state["kind"], state["here"] = [m.type for m in marks], [m.alive for m in marks]
            state["picked"] = (self.scenario._cached_global_collecting or 0.0) / 5
            state["delivered"] = (self.scenario._cached_global_deposit or 0.0) / 5
        return state

    def benchmark(self) -> dict[str, float]:
        """Our stats, as far as they can be told from what mpe2 reports for benchmarking."""
        data = [self.scenario.benchmark_data(a, self.world) for a in self.agents]
        if self.name == "simple_spread":
            _, _, apart, occupied = data[0]
            return {"collisions": sum(x[1] for x in data) / 2, "distance": apart / len(data), "occupied": occupied}
        if self.name == "simple_adversary":
            return {"adversary_distance": data[0] ** 0.5, "distance": min(x[-1] for x in data[1:]) ** 0.5}
        if self.name == "simple_crypto":
            eve, bob = (((said - secret) ** 2).sum() for said, secret in data[:2])
            return {"eve_error": eve, "bob_error": bob}
        if self.name == "simple_speaker_listener":
            return {"distance": (-data[0]) ** 0.5}
        if self.name in ("simple_tag", "simple_world_comm"):
            return {"touches": sum(data)}
        if self.name == "collect_treasure":
            collectors = sum(a.collector for a in self.agents)
            return {"held": sum(x[0] is not None for x in data[:collectors]), "treasures": data[0][1]}
        return {}

    def on_edge(self, margin: float = 1e-4) -> bool:
        """Whether some comparison that the scenario makes is so close that float32 may decide it the other way."""
        bodies = self.world.entities
        pos, size = np.array([e.state.p_pos for e in bodies]), np.array([e.size for e in bodies])
        apart = np.linalg.norm(pos[:, None] - pos[None], axis=-1)
        pairs = np.triu_indices(len(pos), 1)
        edges = [apart[pairs] - (size[:, None] + size[None])[pairs], apart[pairs] - 0.1]  # touching; occupied
        edges += [np.diff(np.sort(row)) for row in apart]  # which one is nearer
        if self.name == "simple_formation":  # the first angle, where the circle closes
            arms = pos[:-1] - pos[-1]
            edges.append(arms[arms[:, 0] > 0, 1])
        if self.name in ("simple_formation", "simple_line") and self.scenario._delta_dists is not None:
            edges.append(self.scenario._delta_dists - 0.05)
        return bool(any((np.abs(e) < margin).any() for e in edges))


def joined(references: list[Reference]) -> dict[str, torch.Tensor]:
    """The state of all rows, as `set_state` takes it."""
    rows = [r.read() for r in references]
    return {k: torch.from_numpy(np.array([row[k] for row in rows])) for k in rows[0]}
