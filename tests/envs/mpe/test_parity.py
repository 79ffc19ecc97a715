"""Our worlds against mpe2: the same draws, states and actions give the same starts, observations, pay and ends.

Rows 0 and 1 start anywhere; the others are crowded together, so that things touch. In float64 both sides run freely for
whole episodes; in float32 mpe2's state is put in before each step, so that errors do not add up and a close decision that
falls the other way (counted as a tie) costs one step.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from shoal.spec import Outcome

from .reference import AGENTS, Reference, joined, make, random_actions

torch.set_num_threads(1)
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
HAPPENS = {  # what has to have happened for a run to prove anything
    "collect_treasure": ("picked", "delivered", "collisions"),
    "simple_push": ("collisions",),
    "simple_spread": ("collisions", "occupied"),
    "simple_tag": ("touches",),
    "simple_world_comm": ("touches", "food", "hidden"),
}


@dataclass
class EpisodeStats:
    compared: int = 0  # agents x rows x steps x dtypes
    benchmarks: int = 0  # figures x rows x steps
    ties: int = 0
    terminated: int = 0
    worst: dict[torch.dtype, float] = field(default_factory=lambda: dict.fromkeys(CLOSE, 0.0))
    happened: dict[str, float] = field(default_factory=dict)


def agents_of(outcome_part: Any, attribute: str, row: int) -> list[np.ndarray]:
    """A row's agents, group after group."""
    return [x.double().numpy() for view in outcome_part.values() for x in getattr(view, attribute)[row]]


def far(ours: Any, theirs: Any) -> float:
    return max(float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max()) for a, b in zip(ours, theirs, strict=True))


def play(
    name: str, actions: str, rows: int = 5, steps: int = 25, stages: dict[int, int] | None = None, **settings: Any
) -> EpisodeStats:
    episode_stats, stages = EpisodeStats(), stages or {}
    gen = torch.Generator().manual_seed(zlib.crc32(f"{name} {actions} {settings}".encode()))
    worlds = {dtype: make(name, rows, dtype, actions=actions, **settings) for dtype in CLOSE}
    refs = [Reference(name, actions, **settings) for _ in range(rows)]
    exact = worlds[torch.float64]
    begin, goals = exact.noise_begin, exact.goals

    def draw() -> torch.Tensor:
        noise = torch.rand(rows, exact.noise, generator=gen, dtype=torch.float64)
        crowd = torch.tensor([1.0, 1.0, 0.3, 0.15, 0.05], dtype=torch.float64)[:rows, None]
        noise[:, goals:] = 0.5 + (noise[:, goals:] - 0.5) * crowd
        return noise

    def set_stage(t: int) -> None:
        for world in worlds.values():
            world.stage.fill_(stages[t])
        for ref in refs:
            ref.scenario.set_curriculum_stage(stages[t])

    def same_state() -> None:
        for k, theirs in joined(refs).items():
            assert far([exact.state[k]], [theirs]) < 1e-6, k

    if 0 in stages:
        set_stage(0)
    noise = draw()
    frame = exact.reset(noise)
    for row, ref in enumerate(refs):
        ref.reset(noise[row, :begin].numpy())
        assert far(agents_of(frame.views, "obs", row), ref.observe()) < 1e-6
    same_state()

    for t in range(steps):
        if t and t in stages:
            set_stage(t)
        if t % 2 == 0:  # held for two steps, to get somewhere
            chosen = random_actions(exact, gen)
        noise = draw()
        worlds[torch.float32].set_state(joined(refs))
        outs: dict[torch.dtype, Outcome] = {dtype: world.step(chosen, noise) for dtype, world in worlds.items()}
        for row, ref in enumerate(refs):
            flat = [x for g in chosen.values() for x in g[row]]
            ref.step([x.numpy() if x.dim() else int(x) for x in flat], noise[row, begin:].numpy())
            seen, learner_reward, gone, cut, edge = (
                ref.observe(),
                ref.rewards(),
                ref.terminated(),
                ref.truncated(),
                ref.on_edge(),
            )
            figures = ref.benchmark()
            over = bool(gone.any() or cut.any())
            if over:
                ref.reset(noise[row, :begin].numpy())
            fresh = ref.observe()
            for dtype, out in outs.items():
                results = agents_of(out.results, "reward", row)
                ended = np.array(agents_of(out.results, "terminated", row), bool)
                gaps = [far(agents_of(out.next.views, "obs", row), seen), far(results, learner_reward)]
                gaps += [far([out.stats[k][row]], [v]) for k, v in figures.items()]
                right = (ended == gone).all() and (bool(out.over[row]) and not ended.all()) == cut.all()
                if dtype == torch.float64 or right:
                    gaps.append(far(agents_of(out.frame.views, "obs", row), fresh))
                if dtype == torch.float32 and edge and not (right and max(gaps) < CLOSE[dtype]):
                    episode_stats.ties += 1
                else:
                    assert right, f"{dtype} step {t} row {row}: terminated {ended}, over {out.over[row]}; mpe2 {gone}, {cut}"
                    assert max(gaps) < CLOSE[dtype], f"{dtype} step {t} row {row}: obs, pay, figures, frame differ by {gaps}"
                    episode_stats.worst[dtype] = max(episode_stats.worst[dtype], *gaps)
                episode_stats.compared += len(results)
            episode_stats.benchmarks += len(figures)
            episode_stats.terminated += int(gone.any())
        same_state()
        for k, v in outs[torch.float64].stats.items():
            episode_stats.happened[k] = episode_stats.happened.get(k, 0.0) + float(v.sum())
    print(f"{name} {actions} {settings}: {episode_stats}")
    return episode_stats


@pytest.mark.parametrize("actions", ["discrete", "continuous"])
@pytest.mark.parametrize("name", AGENTS)
def test_default_worlds_are_mpe2s(name: str, actions: str) -> None:
    episode_stats = play(name, actions)
    assert episode_stats.compared == 2 * 5 * 25 * AGENTS[name]
    figures = {"simple_spread": 3, "simple_adversary": 2, "simple_crypto": 2, "simple_speaker_listener": 1}
    figures |= {"simple_tag": 1, "simple_world_comm": 1, "collect_treasure": 2}
    assert episode_stats.benchmarks == 5 * 25 * figures.get(name, 0)
    assert episode_stats.ties <= 2
    for event in HAPPENS.get(name, ()):
        assert episode_stats.happened[event] > 0, f"no {event} in the whole run: it proves nothing about them"


VARIANTS: list[tuple[int, str, dict[str, Any]]] = [  # agents, id, settings
    (5, "simple_spread", {"n": 5, "agent_neighbors": 2, "landmark_neighbors": 7, "local_ratio": 0.2}),
    (4, "simple_spread", {"n": 4, "agent_neighbors": 9, "landmark_neighbors": 1, "local_ratio": 1.0, "max_cycles": 7}),
    (2, "simple_spread", {"n": 2, "terminate_on_success": True, "curriculum": True, "stages": {9: 1}}),
    (1, "simple_spread", {"n": 1, "local_ratio": 0.0}),
    (5, "simple_adversary", {"n": 4, "agent_neighbors": 2, "landmark_neighbors": 6}),
    (2, "simple_adversary", {"n": 1, "agent_neighbors": 3, "landmark_neighbors": 1}),
    (6, "simple_formation", {"n": 6}),
    (2, "simple_formation", {"n": 2}),
    (1, "simple_formation", {"n": 1, "terminate_on_success": True}),
    (5, "simple_line", {"n": 5}),
    (2, "simple_line", {"n": 2}),
    (1, "simple_line", {"n": 1, "terminate_on_success": True}),
    (2, "simple_reference", {"local_ratio": 0.8}),
    (2, "simple_reference", {"local_ratio": 0.0}),
    (4, "simple_tag", {"num_good": 2, "num_adversaries": 2, "num_obstacles": 0, "agent_neighbors": 2, "landmark_neighbors": 1}),
    (7, "simple_tag", {"num_good": 3, "num_adversaries": 4, "num_obstacles": 3, "agent_neighbors": 8, "landmark_neighbors": 2}),
    (3, "simple_tag", {"num_good": 2, "num_adversaries": 1, "num_obstacles": 1}),
    (5, "simple_tag", {"num_good": 4, "num_adversaries": 1, "num_obstacles": 0, "terminate_on_success": True}),
    (4, "simple_tag", {"terminate_on_success": True, "curriculum": True, "stages": {5: 1, 15: 2}}),
    (4, "simple_tag", {"curriculum": True, "max_cycles": 9, "stages": {0: 1, 4: 0, 12: 2}}),
    (2, "simple_world_comm", {"num_good": 1, "num_adversaries": 1, "num_obstacles": 2, "num_food": 1, "num_forests": 0}),
    (5, "simple_world_comm", {"num_good": 3, "num_adversaries": 2, "num_obstacles": 0, "num_food": 3, "num_forests": 4}),
    (3, "collect_treasure", {"num_collectors": 2, "num_deposits": 1, "num_treasures": 9}),
    (14, "collect_treasure", {"num_collectors": 8, "num_deposits": 6, "num_treasures": 3}),
]


@pytest.mark.parametrize(("agents", "name", "settings"), VARIANTS, ids=lambda x: str(x).replace(" ", ""))
def test_other_settings_are_mpe2s(agents: int, name: str, settings: dict[str, Any]) -> None:
    episode_stats = play(name, "discrete", **settings)
    assert episode_stats.compared == 2 * 5 * 25 * agents
    assert episode_stats.ties <= 2
    if settings.get("terminate_on_success"):
        assert episode_stats.terminated > 0, "no episode ended in success: it proves nothing about that"


def test_a_whole_episode_of_success_at_the_horizon_is_truncated() -> None:
    episode_stats = play("simple_formation", "discrete", n=1, terminate_on_success=True, max_cycles=1)
    assert episode_stats.happened["success"] > 0
    assert episode_stats.terminated == 0
