"""The particle world: B rows of round bodies in the plane that push, collide and talk (Lowe et al., 2017).

The physics is `mpe2`'s: every step

    pos <- pos + vel dt,    vel <- (1 - damping) vel + (force / mass) dt,    |vel| <= max_speed,

with dt 0.1 and damping 0.25. The force is the agent's own push (5 times the action, or its `accel`) and, between two
bodies that collide, k m log(1 + exp((d_min - d) / m)) along the line between them, k = 100, m = 0.001, taken at the
place before the step. Starts, rewards and observations are the scenario's, one file each. State:

    pos [B, agents + landmarks, 2]    vel [B, agents, 2]    comm [B, agents, words] (where somebody talks)
    goal [B, goals], which landmarks are the goals (where there are some), and what a scenario adds

Actions are discrete (stay, left, right, down, up; times the words for one who talks as well), `multi` (the move and
the word as two choices), or continuous (the same five numbers in [0, 1], then the words).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shoal.envs.base import Move, State, World
from shoal.envs.drawing import Color, Sketch
from shoal.envs.mpe.bodies import Body
from shoal.envs.mpe.drawing import sketch
from shoal.spec import Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, Result, Slots, Space, UserError

DT, DAMPING, CONTACT_FORCE, CONTACT_MARGIN = 0.1, 0.25, 1e2, 1e-3
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))

Parts = list[tuple[str, Tensor]]  # an observation: what each block is of, and the block [B, n, width] or [B, n, count, width]


class Scenario(World, ABC):
    """A scenario says who is there (`cast`), how they start, what they see and what they are paid."""

    @dataclass(frozen=True)
    class Config:
        actions: Literal["discrete", "multi", "continuous"] = "discrete"  # kind of actions; multi: move and word apart
        max_cycles: int = 25  # steps an episode
        rules: Literal["mpe2", "openai"] = "mpe2"  # who pays: mpe2, or the original OpenAI worlds, for older logs

    words: ClassVar[int] = 0  # size of a message
    goals: ClassVar[int] = 0  # landmarks that are drawn as goals, before any place is
    teams: ClassVar[dict[str, str]] = {}  # name stem -> team; a stem that is not named is a team of its own
    openai: ClassVar[bool] = True  # the OpenAI worlds had this scenario
    common: bool = False
    stats_over: ClassVar[dict[str, str]] = {}  # names of `stats`, and how an episode sums each up; `success` may end it

    # --- what a scenario writes ---

    @abstractmethod
    def cast(self) -> tuple[list[Body], list[Body]]:
        """Agents, in the reference's order, and landmarks."""

    @abstractmethod
    def sees(self, w: State) -> dict[str, Parts]:
        """For each name stem, the blocks of its agents' observations."""

    @abstractmethod
    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        """After the step: rewards [B, agents], and the `stats`, each [B]."""

    def place(self, noise: Tensor) -> State:
        """Starts: goals, then everybody anywhere. noise [B, noise_begin], used in the order of the reference's draws."""
        pos = {"pos": self.scatter(noise[:, self.goals :], self.within)}
        return {**pos, "goal": self.choose(noise[:, : self.goals], len(self.landmarks))} if self.goals else pos

    def react(self, w: State, noise: Tensor) -> State:
        """What changes between the physics and the pay."""
        return w

    def thrust(self, state: State) -> Tensor:
        """How hard agents push: [agents, 1] or [B, agents, 1]."""
        return self.accel

    def speed_limit(self, state: State) -> Tensor | None:
        """[agents, 1] or [B, agents, 1]."""
        return self.max_speed

    def colors(self, w: State, row: int) -> dict[int, Color]:
        """Bodies (by index) that are not drawn in their own colour now."""
        return {}

    # --- the world, once ---

    def setup(self) -> None:
        if self.config.rules == "openai" and not self.openai:
            raise UserError(f"the OpenAI worlds had no {type(self).__module__.rpartition('.')[2]}: leave --env.rules at mpe2.")
        if self.config.max_cycles < 1:
            raise UserError(f"--env.max-cycles is {self.config.max_cycles}: an episode needs at least one step.")
        agents, landmarks = self.cast()
        self.agents, self.landmarks, self.bodies = agents, landmarks, agents + landmarks
        n = len(agents)
        self.talkers = [i for i, a in enumerate(agents) if not a.silent]
        self.silence = torch.zeros(self.rows, n, self.words, dtype=self.dtype, device=self.device)
        self.stillness = torch.zeros(self.rows, n, 2, dtype=self.dtype, device=self.device)
        self.code = torch.eye(self.words, dtype=self.dtype, device=self.device)  # a word's number -> its message
        self.accel = self.tensor([a.accel for a in agents])[:, None]
        self.gain = self.tensor([DT / a.mass if a.movable else 0.0 for a in agents])[:, None]
        speeds = [a.max_speed or float("inf") for a in agents]
        self.max_speed = None if all(s == float("inf") for s in speeds) else self.tensor(speeds)[:, None]
        self.within = self.tensor([b.within for b in self.bodies])[:, None]
        self.sizes = self.tensor([b.size for b in self.bodies])
        self.reach = self.sizes[:, None] + self.sizes[None]  # two bodies overlap when nearer than this
        self.moves = self.tensor(MOVES)
        self.zero = self.tensor(0.0)
        self.stage = torch.zeros((), dtype=torch.long, device=self.device)  # of a curriculum, where there is one
        # pairs that can touch and of which one at least can be pushed
        pushed = [b.collides and i < n and b.movable for i, b in enumerate(self.bodies)]
        pairs = [
            (i, j)
            for i, j in combinations(range(len(self.bodies)), 2)
            if self.bodies[i].collides and self.bodies[j].collides and (pushed[i] or pushed[j])
        ]
        self.pairs = self.index([i for i, _ in pairs]), self.index([j for _, j in pairs])
        self.touching = self.reach[self.pairs]
        # for each agent, the pairs that it is in and which way each pushes it; no matrix product, whose precision is the nets'
        mine = [[(k, 1.0 if i == a else -1.0) for k, (i, j) in enumerate(pairs) if a in (i, j) and pushed[a]] for a in range(n)]
        most = max((len(x) for x in mine), default=0)
        mine = [x + [(0, 0.0)] * (most - len(x)) for x in mine]
        self.in_pairs, self.pushed = (
            self.index([[k for k, _ in x] for x in mine]),
            self.tensor([[w for _, w in x] for x in mine]),
        )
        self._others: dict[tuple[int, ...], Tensor] = {}
        self.everyone = list(range(n))
        self.marks = list(range(n, n + len(landmarks)))
        self.noise_begin = self.noise_begin or self.goals + 2 * len(self.bodies)

        stems = [a.name.rpartition("_")[0] for a in agents]
        self.stems = {stem: [i for i, s in enumerate(stems) if s == stem] for stem, _ in groupby(stems)}
        self.fixed_length = not getattr(self.config, "terminate_on_success", False)
        blank = self._begun(torch.full((self.rows, self.noise_begin), 0.5, dtype=self.dtype, device=self.device))
        parts = self.sees(blank)
        groups = []
        for stem, members in self.stems.items():
            name = stem if len(self.stems) > 1 else "agents"
            width, layout = _layout(parts[stem])
            team = self.teams.get(stem, name)
            names = tuple(agents[i].name for i in members)
            groups.append(Group(name, team, names, (width,), self._space(agents[members[0]]), layout))
        self.spec = EnvSpec(tuple(groups), common=self.common, horizon=self.config.max_cycles, stats=dict(self.stats_over))

    def begin(self, noise: Tensor) -> State:
        state = self.place(noise)
        state["vel"] = self.stillness.clone()  # of the row's own: whoever captures a step may write into a state
        if self.talkers:
            state["comm"] = self.silence.clone()
        return state

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        push, comm = self._control(state, actions)
        w = {**state, **self._move(state, push)}
        if self.talkers:
            w["comm"] = comm
        w = self.react(w, noise)
        reward, stats = self.rewards(w)
        # at the horizon the reference truncates, done or not
        done = None if self.fixed_length else (stats["success"] > 0) & (state["clock"] + 1 < self.config.max_cycles)
        results = {}
        for g, members in zip(self.spec.groups, self.stems.values(), strict=True):
            gone = self.never(g.n) if done is None else done[:, None].expand(self.rows, g.n)
            results[g.name] = Result(reward[:, members[0] : members[-1] + 1], gone)
        return Move(w, results, done, stats)

    def observe(self, state: State) -> Frame:
        parts = self.sees(state)
        views = {}
        for g, stem in zip(self.spec.groups, self.stems, strict=True):
            blocks = [x if x.dim() == 3 else x.flatten(2) for _, x in parts[stem]]
            views[g.name] = self.view(torch.cat(blocks, -1), state["clock"])
        return Frame(views)

    def draw(self, row: int = 0) -> Sketch:
        return sketch(self, row)

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "stage": self.stage.expand(self.rows).clone()}

    def set_state(self, state: dict[str, Any]) -> Frame:
        state = dict(state)
        stage = state.pop("stage", None)
        if stage is not None:
            self.stage.copy_(stage[0])
        return super().set_state(state)

    # --- for scenarios ---

    def scatter(self, noise: Tensor, extent: float | Tensor = 1.0) -> Tensor:
        """Two uniform numbers a body -> places in [-extent, extent]: [B, bodies, 2]."""
        return (noise.reshape(self.rows, -1, 2) * 2 - 1) * extent

    def choose(self, noise: Tensor, n: int) -> Tensor:
        """A uniform number -> an integer below n."""
        return (noise * n).long().clamp_(max=n - 1)

    def others(self, members: Sequence[int], among: Sequence[int] | None = None) -> Tensor:
        """For each member, the indices of the others: [n, others]."""
        among = self.everyone if among is None else among
        key = (*members, -1, *among)
        if key not in self._others:
            self._others[key] = self.index([[j for j in among if j != i] for i in members])
        return self._others[key]

    def gaps(self, w: State, members: Sequence[int], to: Sequence[int] | Tensor) -> Tensor:
        """Places of `to` (the same for all members, or a row of indices for each) seen from the members: [B, n, k, 2]."""
        pos = w["pos"]
        there = pick(pos, to) if isinstance(to, Tensor) else pos[:, None, span(to)]
        return there - pos[:, span(members), None]

    def distances(self, w: State, members: Sequence[int], to: Sequence[int]) -> Tensor:
        return length(self.gaps(w, members, to))  # [B, n, k]

    def contacts(self, w: State, members: Sequence[int], to: Sequence[int]) -> Tensor:
        """Which members overlap which of `to`: bool [B, n, k]. A body overlaps itself."""
        return self.distances(w, members, to) < self.reach[span(members), span(to)]

    def velocities(self, w: State, members: Sequence[int]) -> Tensor:
        return w["vel"][:, span(members)]

    def places(self, w: State, members: Sequence[int]) -> Tensor:
        return w["pos"][:, span(members)]

    def aims(self, w: State) -> Tensor:
        """Where the goals are: [B, goals, 2]."""
        return w["pos"].gather(1, (w["goal"] + len(self.agents))[..., None].expand(-1, -1, 2))

    # --- inside ---

    def _space(self, body: Body) -> Space:
        sizes = ((len(MOVES),) if body.movable else ()) + (() if body.silent else (self.words,))
        if self.config.actions == "continuous":
            return Box((0.0,) * sum(sizes), (1.0,) * sum(sizes))
        if self.config.actions == "multi" and len(sizes) > 1:
            return MultiDiscrete(sizes)
        n = 1
        for size in sizes:
            n *= size
        return Discrete(n)

    def _control(self, state: State, actions: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Actions -> pushes [B, agents, 2] and messages [B, agents, words]."""
        pushes, messages, thrust = [], [], self.thrust(state)
        for g, members in zip(self.spec.groups, self.stems.values(), strict=True):
            body, at = self.agents[members[0]], span(members)
            meant = self._by_numbers if g.action.kind == "continuous" else self._by_choices
            move, message = meant(actions[g.name], body)
            pushes.append(move * thrust[..., at, :] if body.movable else self.stillness[:, at])
            messages.append(self.silence[:, at] if body.silent else message)
        return (pushes[0], messages[0]) if len(pushes) == 1 else (torch.cat(pushes, 1), torch.cat(messages, 1))

    def _by_choices(self, a: Tensor, body: Body) -> tuple[Any, Any]:
        """The direction and the message of whoever moves, and talks."""
        both = body.movable and not body.silent
        step, word = a.unbind(-1) if a.dim() == 3 else (a % len(MOVES), a // len(MOVES)) if both else (a, a)
        return self.moves[step] if body.movable else None, None if body.silent else self.code[word]

    def _by_numbers(self, a: Tensor, body: Body) -> tuple[Any, Any]:
        a = a.to(self.dtype)
        move = torch.stack((a[..., 2] - a[..., 1], a[..., 4] - a[..., 3]), -1) if body.movable else None
        return move, a[..., a.shape[-1] - self.words :]

    def _move(self, state: State, push: Tensor) -> State:
        pos, vel = state["pos"], state["vel"]
        n = len(self.agents)
        if self.pairs[0].numel():
            delta = pick(pos, self.pairs[0]) - pick(pos, self.pairs[1])  # [B, pairs, 2]
            dist = length(delta)
            depth = torch.logaddexp(self.zero, (self.touching - dist) / CONTACT_MARGIN) * CONTACT_MARGIN
            force = delta * (CONTACT_FORCE * depth / dist.clamp(min=1e-12))[..., None]
            push = push + (pick(force, self.in_pairs) * self.pushed[..., None]).sum(2)
        moved = pos[:, :n] + vel * DT
        pos = torch.cat((moved, pos[:, n:]), 1) if self.landmarks else moved
        vel = vel * (1 - DAMPING) + push * self.gain
        limit = self.speed_limit(state)
        if limit is not None:
            speed = length(vel)[..., None]
            vel = torch.where(speed > limit, vel / speed * limit, vel)
        return {"pos": pos, "vel": vel}


def _layout(parts: Parts) -> tuple[int, tuple[Slots, ...]]:
    layout, at = [], 0
    for entity, x in parts:
        count, width = (1, x.shape[2]) if x.dim() == 3 else (x.shape[2], x.shape[3])
        if count * width:
            layout.append(Slots(entity, at, count, width))
        at += count * width
    return at, tuple(layout)


def length(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


def span(members: Sequence[int]) -> slice:
    """Neighbouring indices as a slice: a view, where a list of indices would copy."""
    return slice(members[0], members[-1] + 1) if members else slice(0, 0)


def pick(x: Tensor, which: Tensor) -> Tensor:
    """x[:, which], [B, m, w] -> [B, *which, w]; on a CPU several times faster than indexing."""
    return x.index_select(1, which.flatten()).unflatten(1, which.shape)
