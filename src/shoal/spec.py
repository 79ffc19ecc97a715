"""The nouns that every room shares: spaces, groups, and from `frames.py` views, frames, outcomes, batches.

Letters in every shape comment: `T` time, `B` rows, `N` agents of a group, `O` observation, `A` choices, `D` action
dimensions, `S` state.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from shoal.frames import Batch, Frame, Outcome, Pay, Result, View

__all__ = ["Batch", "Frame", "Outcome", "Pay", "Result", "View"]  # of `frames.py`, for worlds and algorithms

Shape = tuple[int, ...]


class UserError(ValueError):
    """Something the user asked for cannot be: one sentence that says what was wrong and what to do. Exit status 2; and 1 if
    it is `late`: a run was under way, and has been written to."""

    late = False


class StoppedError(UserError):
    """The same of a run that was under way and has written to its folder. Exit status 1."""


class NotFiniteError(UserError):
    """A world gave a number that is not finite. `diverged`: because the policy did, in its action."""

    def __init__(self, sentence: str, diverged: bool = False):
        super().__init__(sentence)
        self.diverged = diverged


class TerminatedError(KeyboardInterrupt):
    """As KeyboardInterrupt, for SIGTERM. Exit status 143."""


# --- spaces ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Discrete:
    """One choice of n. Actions are long [B, N]."""

    n: int
    kind = "discrete"

    @cached_property
    def sizes(self) -> Shape:
        return (self.n,)

    @cached_property
    def shape(self) -> Shape:
        return ()


@dataclass(frozen=True)
class MultiDiscrete:
    """Several choices at once. Actions are long [B, N, D]."""

    sizes: Shape
    kind = "multi-discrete"

    @cached_property
    def shape(self) -> Shape:
        return (len(self.sizes),)


@dataclass(frozen=True)
class Box:
    """D bounded numbers. Policies speak in [-1, 1]; the collector clips and scales. Actions are float [B, N, D]."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    kind = "continuous"

    @cached_property
    def shape(self) -> Shape:
        return (len(self.low),)


Space = Discrete | MultiDiscrete | Box


# --- what a world is -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """A block of a flat observation: `count` entities of one kind, `width` numbers each, from index `start`."""

    entity: str
    start: int
    count: int
    width: int


@dataclass(frozen=True)
class Group:
    """Agents of one team with equal spaces and one name stem: the unit of parameters and of tensors."""

    name: str
    team: str
    agents: tuple[str, ...]
    obs: Shape | dict[str, Shape]  # named shapes where one tensor cannot hold it
    action: Space
    layout: tuple[Slots, ...] = ()
    mortal: bool = False  # agents may die, arrive late or wait: alive, active and start are not constant
    masked: bool = False  # View.legal is given

    @cached_property
    def n(self) -> int:
        return len(self.agents)


@dataclass(frozen=True)
class EnvSpec:
    groups: tuple[Group, ...]
    state: int | None = None  # S, the size of the world's own state; none: the joined observations are the state
    common: bool = False  # the agents of a team are always paid alike
    turns: bool = False  # agents move in turn
    horizon: int | None = None  # the most steps an episode has
    stats: dict[str, str] = field(default_factory=dict)  # name -> how an episode sums it up: "sum", "mean" or "last"

    def __getitem__(self, name: str) -> Group:
        return next(g for g in self.groups if g.name == name)

    @cached_property
    def teams(self) -> dict[str, tuple[Group, ...]]:
        names = dict.fromkeys(g.team for g in self.groups)
        return {t: tuple(g for g in self.groups if g.team == t) for t in names}


def spec_data(spec: EnvSpec) -> dict[str, Any]:
    """A spec for JSON."""
    data = asdict(spec)
    for g, out in zip(spec.groups, data["groups"], strict=True):
        out["action"] = {"kind": g.action.kind, **out["action"]}
    return data


def spec_of(data: dict[str, Any]) -> EnvSpec:
    """What `spec_data` wrote down."""
    kinds: dict[Any, Any] = {c.kind: c for c in (Discrete, MultiDiscrete, Box)}

    def shape(x: Any) -> Any:
        return {k: tuple(s) for k, s in x.items()} if isinstance(x, dict) else tuple(x)

    groups = []
    for g in data["groups"]:
        action = {k: tuple(x) if isinstance(x, list) else x for k, x in g["action"].items()}
        space = kinds[action.pop("kind")](**action)
        layout = tuple(Slots(**s) for s in g["layout"])
        groups.append(Group(**{**g, "agents": tuple(g["agents"]), "obs": shape(g["obs"]), "action": space, "layout": layout}))
    return EnvSpec(**{**data, "groups": tuple(groups)})
