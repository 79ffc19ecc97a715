"""Groups as the user says, on any world: `--regroup fast=agent_0 slow=agent_1,agent_2`.

Who is in one group shares settings, algorithm, nets and metrics; in a group alone an agent has its own. `Regrouping` puts the
agents' tensors side by side in other groups, and back. What is played is the world itself: a native one as a `World` made of
the same three functions, so that it is captured and fused as before; another behind a thin front. Groups stay in the team that
their agents came from. Environments of libraries that do not say who plays together form the groups themselves, see
`grouping.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from shoal.envs.base import Environment, Move, State, World
from shoal.envs.conversions import Conversion
from shoal.envs.drawing import Sketch
from shoal.envs.grouping import read_groups
from shoal.flags import build
from shoal.spec import EnvSpec, Frame, Group, Outcome, Result, UserError, View
from shoal.tree import tree_map

Piece = tuple[str, int, int]  # of a group the agents from here to there
Constant = Callable[[Tensor, int], Tensor | None]  # of flags that never change the same of n agents; none: they may change


def any_may_change(flags: Tensor, n: int) -> None:
    return None


class Regrouping:
    """From the groups of `old` to those of `new`, which have the same agents."""

    def __init__(self, old: EnvSpec, new: EnvSpec):
        self.new = new
        self.pieces, self.back = _pieces(old, new), _pieces(new, old)

    def frame(self, frame: Frame, constant: Constant = any_may_change) -> Frame:
        """A frame by the new groups."""
        return Frame({g: self.view(frame.views, g, constant) for g in self.pieces}, frame.state)

    def view(self, views: dict[str, View], group: str, constant: Constant = any_may_change) -> View:
        pieces, n = self.pieces[group], self.new[group].n

        def side_by_side(part: str) -> Any:
            found = {g: getattr(views[g], part) for g, _, _ in pieces}
            known = [constant(x, n) if isinstance(x, Tensor) else None for x in found.values()]
            same = known[0] is not None and all(x is known[0] for x in known)
            return known[0] if same else taken(found, pieces)

        alive, active, start = map(side_by_side, ("alive", "active", "start"))
        return View(side_by_side("obs"), alive, active, start, side_by_side("legal"))

    def results(self, results: dict[str, Result]) -> dict[str, Result]:
        return {g: taken(results, pieces) for g, pieces in self.pieces.items()}

    def outcome(self, o: Outcome) -> Outcome:
        following = self.frame(o.next)
        frame = following if o.frame is o.next else self.frame(o.frame)
        return Outcome(self.results(o.results), o.over, o.stats, following, frame, o.lost)

    def actions(self, actions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the new groups, by the old ones."""
        return {g: taken(actions, pieces) for g, pieces in self.back.items()}


def taken(trees: dict[str, Any], pieces: list[Piece]) -> Any:
    """The pieces of the groups' trees of [B, N, ...], side by side."""
    parts = [tree_map(lambda x, a=a, b=b: x[:, a:b], trees[g]) for g, a, b in pieces]
    return parts[0] if len(parts) == 1 else tree_map(lambda *xs: torch.cat(xs, 1), *parts)


def _pieces(source: EnvSpec, target: EnvSpec) -> dict[str, list[Piece]]:
    """Group of the target -> where its agents are in the source, as few pieces as there can be."""
    at = {a: (g.name, i) for g in source.groups for i, a in enumerate(g.agents)}
    found: dict[str, list[Piece]] = {}
    for group in target.groups:
        places = [at[a] for a in group.agents]
        runs = [list(run) for _, run in groupby(enumerate(places), lambda x: (x[1][0], x[1][1] - x[0]))]
        found[group.name] = [(run[0][1][0], run[0][1][1], run[-1][1][1] + 1) for run in runs]
    return found


def respecified(spec: EnvSpec, text: str) -> EnvSpec:
    """The spec with groups as `text` says."""
    of = {a: g for g in spec.groups for a in g.agents}
    alike = {a: dataclasses.replace(g, name="", team="", agents=()) for a, g in of.items()}
    groups: list[Group] = []
    for name, agents in read_groups(text, list(of), alike).items():
        first, *rest = (of[a] for a in agents)
        for a, g in zip(agents[1:], rest, strict=True):
            if g.team != first.team:
                raise UserError(
                    f"--regroup has {agents[0]!r} and {a!r} in {name!r}: a group wins together, and they are of the teams "
                    f"{first.team} and {g.team}."
                )
        groups.append(dataclasses.replace(first, name=name, agents=tuple(agents)))
        if name in spec.teams and {a for a, g in of.items() if g.team == name} != set(agents):
            raise UserError(f"--regroup has a group {name!r}, and so is a team of other agents called: choose another name.")
    return dataclasses.replace(spec, groups=tuple(groups))


def regrouped(cls: Any, config: Any, text: str, **how: Any) -> Environment:
    """An environment of this class with groups as `text` says."""
    if any(f.name == "groups" and not f.metadata.get("flag", True) for f in dataclasses.fields(cls.Config)):
        return cls(build(cls.Config, {**vars(config), "groups": text}, "env"), **how)  # it forms them, and teams of them
    if issubclass(cls, World):
        return _RegroupedWorld(_Asked(cls, config, text), **how)
    return behind(cls(config, **how), text)


def behind(env: Environment, text: str) -> Environment:
    """The same environment, in front of which groups are as `text` says."""
    return _RegroupedEnvironment(env, text)


@dataclass(frozen=True)
class _Asked:
    """Which native world, and how."""

    cls: Any
    config: Any
    text: str


class _RegroupedWorld(World):
    def setup(self) -> None:
        asked: _Asked = self.config
        self.inner: World = asked.cls(asked.config, self.rows, self.device, self.dtype)
        inner, self.spec = self.inner, respecified(self.inner.spec, asked.text)
        self.regrouping = Regrouping(inner.spec, self.spec)
        self.noise_begin, self.noise_step = inner.noise_begin, inner.noise_step
        self.fixed_length, self.widest = inner.fixed_length, inner.widest

    @property
    def conversions(self) -> dict[str, Conversion]:
        return self.inner.conversions

    def begin(self, noise: Tensor) -> State:
        return self.inner.begin(noise)

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        move = self.inner.advance(state, self.regrouping.actions(actions), noise)
        results = self.regrouping.results(move.results)
        for g, r in results.items():
            if all(move.results[old].terminated is self.inner.never(self.inner.spec[old].n) for old in self._from(g)):
                r.terminated = self.never(self.spec[g].n)
        return dataclasses.replace(move, results=results)

    def _from(self, group: str) -> list[str]:
        return [old for old, _, _ in self.regrouping.pieces[group]]

    def observe(self, state: State) -> Frame:
        return self.regrouping.frame(self.inner.observe(state), self._always)

    def _always(self, flags: Tensor, n: int) -> Tensor | None:
        """One object for all steps: the rollout buffer knows a constant by that."""
        return self.always(n) if flags is self.inner.always(flags.shape[1]) else None

    def draw(self, row: int = 0) -> Sketch | None:
        self.inner.state = self.state
        return self.inner.draw(row)


class _RegroupedEnvironment(Environment):
    def __init__(self, inner: Any, text: str):  # a world in other processes offers more than every environment does
        self.inner, self.spec = inner, respecified(inner.spec, text)
        self.regrouping = Regrouping(inner.spec, self.spec)
        self.rows, self.device, self.kind, self.noise = inner.rows, inner.device, inner.kind, inner.noise
        self.fixed_length, self.widest, self.halves, self.news = inner.fixed_length, inner.widest, inner.halves, inner.news

    @property
    def conversions(self) -> dict[str, Conversion]:
        return self.inner.conversions

    @property
    def begun_anew(self) -> Tensor | None:  # type: ignore[override]
        return self.inner.begun_anew

    @property
    def restarts(self) -> int:  # type: ignore[override]
        return self.inner.restarts

    @property
    def drawn(self) -> bool:
        return self.inner.drawn

    @drawn.setter
    def drawn(self, drawn: bool) -> None:
        self.inner.drawn = drawn

    def reset(self, noise: Tensor) -> Frame:
        return self.regrouping.frame(self.inner.reset(noise))

    def step(self, actions: dict[str, Tensor], noise: Tensor) -> Outcome:
        return self.regrouping.outcome(self.inner.step(self.regrouping.actions(actions), noise))

    def send(self, k: int, actions: dict[str, Tensor], noise: Tensor) -> None:
        self.inner.send(k, self.regrouping.actions(actions), noise)

    def receive(self, k: int) -> Outcome:
        return self.regrouping.outcome(self.inner.receive(k))

    def mark(self) -> Any:
        return self.inner.mark()

    def rewind(self, mark: Any) -> None:
        self.inner.rewind(mark)

    def get_state(self) -> dict[str, Any]:
        return self.inner.get_state()

    def set_state(self, state: dict[str, Any]) -> Frame:
        return self.regrouping.frame(self.inner.set_state(state))

    def draw(self, row: int = 0) -> Sketch | None:
        return self.inner.draw(row)

    def close(self) -> None:
        self.inner.close()
