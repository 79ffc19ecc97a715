"""Defaults that follow from the world and the run: the one place for such rules.

A setting whose help says `none: ...` and that nobody gave is filled in when an algorithm is made; so its `config` holds the
number, and the run's config.json records it. `rules` of a Config says which of its fields are filled in by which rule; a class
that derives from it and gives such a field a value of its own has that value. Where a world does not say how long an episode
may be, it counts as long. What the defaults reach, and how they were chosen: docs/defaults.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.spec import Box, EnvSpec

SHORT = 50  # steps of an episode up to which it is short: as on the particle worlds
FAR = 500  # from which on it is long, and what a step leads to may show hundreds of steps later
LONG = 1000  # that of which the world does not say how long it may be


@dataclass(frozen=True)
class Facts:
    """What rules may go by."""

    horizon: int  # the most steps an episode has
    agents: int  # of the world
    continuous: bool  # the actions
    steps: int  # of the run
    turns: bool  # agents wait for their turn


Rule = Callable[[Facts], Any]
Rules = Mapping[str, Rule]  # field of a Config -> what it is where nobody gave it


def filled(config: Any, spec: EnvSpec, groups: tuple[str, ...], steps: int) -> Any:
    """The config, with what nobody gave filled in."""
    agents = sum(g.n for g in spec.groups)
    facts = Facts(spec.horizon or LONG, agents, isinstance(spec[groups[0]].action, Box), steps, spec.turns)
    rules: Rules = getattr(config, "rules", {})
    found = {name: rule(facts) for name, rule in rules.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **found) if found else config


# --- all who learn ---


def gamma(f: Facts) -> float:
    """0.95 where episodes are short, else 0.99: what is 50 steps away should count, and no more than there is to be seen."""
    return 0.95 if f.horizon <= SHORT else 0.99


def noise_keep(f: Facts) -> float:
    """How far exploration of continuous actions goes on: about a fiftieth of an episode, at most 20 steps. Where an episode is
    short each step has noise of its own."""
    return round(max(0.0, 1 - max(SHORT / f.horizon, 0.05)), 2) if f.continuous else 0.0


# --- those who learn from a rollout ---


def rollout(f: Facts) -> int:
    """A whole episode where it is short, else 128 steps."""
    return f.horizon if f.horizon <= SHORT else 128


def short_rollout(f: Facts) -> int:
    """One step is taken on a rollout: many short ones, where values can stand in for the rest."""
    return f.horizon if f.horizon <= SHORT else 8


def step_size(f: Facts) -> float:
    """Of the one step that is taken on a rollout."""
    return 5e-3 if f.agents > 1 else 2e-3


def far_gamma(f: Facts) -> float:
    """As `gamma`, and 0.995 where episodes are long: a lander that cares for the next hundred steps alone hovers, and a cart
    drifts off its track."""
    return 0.995 if f.horizon >= FAR else gamma(f)


def lam(f: Facts) -> float:
    """0.95, and 0.98 where episodes are long."""
    return 0.98 if f.horizon >= FAR else 0.95


def minibatches(f: Facts) -> int:
    """Of teams 4, each step of which has all agents in it; of one agent 8, and 32 beyond 500 steps."""
    return 4 if f.agents > 1 else 32 if f.horizon > FAR else 8


def entropy(f: Facts) -> float:
    """The deviation of continuous actions is a weight that the loss moves: it needs no bonus. Choices of teams need more than
    those of one agent, for others are still learning."""
    return 0.0 if f.continuous else 0.02 if f.agents > 1 else 0.01


# --- those who learn from a replay ---


def every(f: Facts) -> float:
    """A hundred thousand updates a run, but no more than one for each environment step and no fewer than one for 25."""
    return _steps_an_update(f, 100_000)


def seldom(f: Facts) -> float:
    """Forty thousand updates a run, within the same bounds."""
    return _steps_an_update(f, 40_000)


def _steps_an_update(f: Facts, updates: int) -> float:
    return min(max(f.steps / updates, 1.0), 25.0)


def warm(f: Facts) -> int:
    """A twentieth of the run, at most 5,000 environment steps: before the first update, or of uniformly random actions."""
    return min(max(f.steps // 20, 1), 5_000)


def tenth(f: Facts) -> int:
    return max(f.steps // 10, 1)


def half(f: Facts) -> int:
    return max(f.steps // 2, 1)


def n_step(f: Facts) -> int:
    """Where episodes are long rewards are far, and three at once bring them nearer. In turns it counts other agents' steps."""
    return 1 if f.turns or f.horizon <= SHORT else 3


def epsilon_keep(f: Facts) -> float:
    """How far a random choice goes on: a tenth of it all in long episodes. Single random steps lead nowhere there."""
    return 0.0 if f.horizon <= SHORT else 0.9


def quarter(f: Facts) -> int:
    return max(f.steps // 4, 1)


def half_episode(f: Facts) -> int:
    return max(rollout(f) // 2, 1)
