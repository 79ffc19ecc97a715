"""What an `Environment` promises (`envs/base.py`), checked step by step with random legal actions.

In the tests of a world of your own:

    from shoal.tools.contract import check_contract

    def test_contract():
        check_contract(MyWorld(rows=4))

It raises an AssertionError that lists everything that is wrong, a sentence each:

    shapes and dtypes       of observations, flags, `legal`, `state`, rewards, `terminated`, `over` and `stats`
    finite                  observations of the living, states and rewards
    alive, active           only the living act; all of them, unless the spec has `turns`; agents die only in `mortal` groups
    start                   true in an agent's first frame and in no other
    terminated, over        who terminated is gone from `next`; a row is over when everybody is gone, or at the horizon
    next, frame             equal but for the rows that are over
    common                  agents of a team are paid alike, where the spec says so
    new tensors             a frame that was handed out is not written over
    determinism             the same noise and actions lead to the same outcomes
    get_state, set_state    from a state in the middle of an episode the world goes on as it did
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from shoal.algos.base import Seat
from shoal.algos.random import Random
from shoal.envs.base import Environment
from shoal.envs.rows import parts
from shoal.nets.config import NetConfig
from shoal.spec import Box, EnvSpec, Frame, Group, Outcome, Result
from shoal.training.collect import Players, play
from shoal.training.seeds import generator
from shoal.tree import tree_leaves, tree_map

Level = Literal["ok", "note", "problem"]
REPLAYED = 64  # steps that are played twice
MIDDLE = REPLAYED // 2  # the step before which the state is taken that the world is restored to


class BrokenError(Exception):
    """So wrong that a check ends here."""

    def __init__(self, about: str, sentence: str):
        super().__init__(sentence)
        self.about = about


@dataclass(frozen=True)
class Finding:
    level: Level
    about: str  # a word or two: seeding, masks
    sentence: str


@dataclass
class Findings:
    """The first finding about each thing."""

    report: Callable[[Finding], None] = lambda finding: None  # hears of each at once
    found: dict[str, Finding] = field(default_factory=dict)

    def add(self, level: Level, about: str, sentence: str) -> None:
        if about not in self.found:
            self.found[about] = Finding(level, about, sentence)
            self.report(self.found[about])

    def problem(self, about: str, sentence: str) -> None:
        self.add("problem", about, sentence)

    def note(self, about: str, sentence: str) -> None:
        self.add("note", about, sentence)


class During(Protocol):
    """Guards calls of the environment's own code: what is being done, and how many calls' time it may take."""

    def __call__(self, doing: str, times: int = 1) -> AbstractContextManager[None]: ...


def check_contract(env: Environment, steps: int = 100, seed: int = 0) -> None:
    """Step `env` with random legal actions, twice the same and once more from a saved state; raise an AssertionError with all
    that breaks the contract. What the environment itself raises is passed on. 64 steps or more check everything.

        from shoal.tools.contract import check_contract
        def test_contract():
            check_contract(MyWorld(rows=4))
    """
    findings = Findings()
    contract = Contract(env, findings)
    try:
        contract.play(steps, seed)
        contract.replay(env)
    except BrokenError as e:
        findings.problem(e.about, str(e))
    problems = [f.sentence for f in findings.found.values() if f.level == "problem"]
    if problems:
        raise AssertionError("\n".join((f"{type(env).__name__} breaks the contract of an Environment:", *problems)))


class Contract:
    """Holds what an environment returns against its spec. `each_step` is called with every frame and outcome, once checked."""

    def __init__(
        self,
        env: Environment,
        findings: Findings,
        during: During = lambda doing, times=1: nullcontext(),
        each_step: Callable[[Frame, Outcome], None] = lambda before, outcome: None,
    ):
        self.env, self.spec, self.rows = env, env.spec, env.rows
        self.findings, self.during, self.each_step = findings, during, each_step
        self.problem, self.note = findings.problem, findings.note
        self.unchecked: set[str] = set()  # what could not be checked
        self.lengths = torch.zeros(env.rows, dtype=torch.long)  # steps of each row's episode
        self.died = {g.name: torch.zeros(env.rows, g.n, dtype=torch.bool) for g in env.spec.groups}  # in this episode
        self.absent = {g: torch.zeros_like(x) for g, x in self.died.items()}  # not alive in the frame before the last

    # --- playing ---

    @torch.no_grad()
    def play(self, steps: int, seed: int = 0, seconds: float = float("inf")) -> None:
        """Reset and take so many steps, or as many as there is time for."""
        env, rows, began = self.env, self.rows, time.monotonic()
        draw, players = generator(seed, "check"), random_players(env.spec)
        self.first_noise = torch.rand(rows, env.noise, generator=draw)
        with self.during("reset", 2 * rows):  # rows may be made only now
            frame = env.reset(self.first_noise)
        self.check_first(frame)
        self.first_frame = tree_map(torch.clone, frame)
        self.recorded: list[tuple[Outcome, Any, Tensor]] = []  # outcome, actions and noise of the first steps
        self.state: Any = None
        for t in range(steps):
            if time.monotonic() - began > seconds:
                break
            noise = torch.rand(rows, env.noise, generator=draw)
            actions, _, _ = players.act(frame, players.memory(rows, env.device), players.noise(draw, rows), explore=True)
            if t == MIDDLE:
                with self.during("get_state"):
                    self.state = env.get_state()
            kept = tree_map(torch.clone, frame)
            with self.during("step", rows):
                outcome = play(env, actions, noise)
            if not same(kept, frame):
                self.problem("tensors", "a frame that was handed out is written over by the next step: give new tensors.")
            self.check_step(frame, outcome)
            self.each_step(frame, outcome)
            if t < REPLAYED:
                self.recorded.append((tree_map(torch.clone, outcome), actions, noise))
            frame = outcome.frame

    @torch.no_grad()
    def replay(self, env: Environment) -> None:
        """The same noise and actions, in this world or in another made like it; and once more from the state in the middle."""
        rule = "make all of it follow from the noise, the actions and the state"
        self.unchecked |= {"repeatable", "starts", "exact resume"}
        with self.during("reset", 5 * env.rows):
            if not same(env.reset(self.first_noise), self.first_frame):
                self.problem("seeding", f"the same noise gives another first frame: {rule}.")
                return
            self.unchecked -= {"repeatable", "starts"} if env.noise else {"repeatable"}
            if env.noise and same(env.reset((self.first_noise + 0.5) % 1), self.first_frame):
                self.note("starts", "other noise gives the same first frame: it always begins alike.")
            env.reset(self.first_noise)
        if not self._repeats(env, 0):
            self.problem("repeatable", f"the same noise and actions led elsewhere: {rule}.")
        elif self.state is not None:
            news = len(env.news)
            self.unchecked -= {"exact resume"}
            with self.during("set_state", REPLAYED * env.rows):
                frame = env.set_state(self.state)
            restored = len(env.news) == news and same(frame, self.recorded[MIDDLE - 1][0].frame)
            if not restored or not self._repeats(env, MIDDLE):
                text = "what follows set_state(get_state()) is not what followed then: a run on it cannot be resumed as it was"
                self.problem("exact resume", f"{text}; put everything that matters into the state.")

    def _repeats(self, env: Environment, first: int) -> bool:
        recorded = self.recorded[first:]
        with self.during("step", len(recorded) * env.rows):
            return all(same(play(env, actions, noise), outcome) for outcome, actions, noise in recorded)

    # --- frames and outcomes ---

    def check_first(self, frame: Frame) -> None:
        self.check_frame(frame, "the first frame")
        for g in self.spec.groups:
            if not torch.equal(frame[g.name].start, frame[g.name].alive):
                self.problem("start flags", f"`start` of {g.name!r} does not hold for all who are there after reset.")

    def check_frame(self, frame: Frame, what: str) -> None:
        rows = self.rows
        if set(frame.views) != {g.name for g in self.spec.groups}:
            raise BrokenError("frames", f"{what} has views of {', '.join(frame.views)}: it must have one of each group.")
        for g in self.spec.groups:
            v, of = frame[g.name], f"of {g.name!r} in {what}"
            for flag in ("alive", "active", "start"):
                require_tensor(getattr(v, flag), (rows, g.n), torch.bool, f"`{flag}` {of}")
            for name, shape in parts(g):
                x = v.obs[name] if isinstance(v.obs, dict) else v.obs
                require_tensor(x, (rows, g.n, *shape), None, f"the observation {of}")
                self._require_finite(x[v.alive], f"an observation {of}")
            if (v.active & ~v.alive).any():
                self.problem("frames", f"`active` {of} holds for some who are not alive: it is a part of `alive`.")
            if not self.spec.turns and not torch.equal(v.active, v.alive):
                self.problem("frames", f"`active` {of} is not `alive`, and the spec has no turns: set turns=True there.")
            if not (g.mortal or self.spec.turns or v.alive.all()):
                self.problem("frames", f"some {of} are not alive, and the group is not mortal: set mortal=True there.")
            if g.masked != (v.legal is not None):
                raise BrokenError("masks", f"`legal` {of} is {'missing' if g.masked else 'given'}: see `masked` in the spec.")
            if v.legal is not None and not isinstance(g.action, Box):
                require_tensor(v.legal, (rows, g.n, sum(g.action.sizes)), torch.bool, f"`legal` {of}")
                if not all(x.any(-1).all() for x in v.legal.split(g.action.sizes, -1)):
                    raise BrokenError("masks", f"`legal` {of} forbids everything to somebody: allow at least one choice.")
        if self.spec.state is None and frame.state is not None:
            raise BrokenError("frames", f"{what} has a state, and the spec says it has none.")
        if self.spec.state is not None:
            require_tensor(frame.state, (rows, self.spec.state), None, f"the state in {what}")
            self._require_finite(frame.state, f"the state in {what}")  # type: ignore[arg-type]

    def check_step(self, before: Frame, out: Outcome) -> None:
        self.check_frame(out.next, "`next`")
        self.check_frame(out.frame, "`frame`")
        require_tensor(out.over, (self.rows,), torch.bool, "`over`")
        if set(out.stats) != set(self.spec.stats):
            raise BrokenError("frames", f"stats are {', '.join(out.stats) or 'none'}, and not those that the spec names.")
        for name, x in out.stats.items():
            require_tensor(x, (self.rows,), None, f"the stat {name!r}")
        going = ~out.over
        if not same(tree_map(lambda x: x[going], out.next), tree_map(lambda x: x[going], out.frame)):
            self.problem("next", "`frame` differs from `next` in rows that are not over: it is `next` there.")
        somebody = torch.zeros(self.rows, dtype=torch.bool)
        for g in self.spec.groups:
            self.check_result(g, out.results[g.name], before[g.name].alive)
            self.check_lives(g, before, out)
            somebody |= out.next[g.name].alive.any(-1)
        if (~somebody & going).any():
            self.problem("ends", "everybody is gone and the row is not over: set `over` when the last one leaves.")
        self.lengths += 1
        if self.spec.horizon and (self.lengths > self.spec.horizon).any():
            text = f"an episode is longer than the {self.spec.horizon} steps that the spec names as its horizon"
            self.problem("horizon", f"{text}: cut it off there, or name the right number.")
        self.lengths[out.over] = 0
        for groups in self.spec.teams.values() if self.spec.common else ():
            reward = torch.cat([out.results[g.name].reward for g in groups], -1)
            if (reward != reward[:, :1]).any():
                self.problem("common pay", "agents of a team are paid unlike, and the spec says common=True: it is false.")

    def check_result(self, g: Group, result: Result, alive: Tensor) -> None:
        """`alive`: who began the step."""
        for name in ("reward", "terminated", "shaping"):
            if (x := getattr(result, name)) is not None:
                require_tensor(x, (self.rows, g.n), torch.bool if name == "terminated" else None, f"`{name}` of {g.name!r}")
        self._require_finite(result.reward, f"a reward of {g.name!r}")
        if (result.terminated & ~alive).any():
            self.problem("lives", f"some of {g.name!r} terminated who were not there before the step.")
        if (result.reward[~alive] != 0).any():
            self.note("ghosts", f"some of {g.name!r} are paid in steps that they did not begin alive.")

    def check_lives(self, g: Group, before: Frame, out: Outcome) -> None:
        """Who came, who left, and what `start` and `terminated` say of it."""
        was, now, new, going = before[g.name], out.next[g.name], out.frame[g.name], ~out.over
        came, left = now.alive & ~was.alive, was.alive & ~now.alive
        if not torch.equal(now.start[going], came[going]) or not torch.equal(new.start[out.over], new.alive[out.over]):
            text = f"`start` of {g.name!r} is not what it should be"
            self.problem("start flags", f"{text}: true in an agent's first frame, and in no other.")
        if (out.results[g.name].terminated & now.alive)[going].any():
            self.problem("lives", f"some of {g.name!r} terminated and are still alive in `next`: who ended is gone.")
        if (came & self.died[g.name])[going].any():
            self.note("return", f"agents of {g.name!r} come back after they died: each time as a new one.")
        dead = self.absent[g.name] & ~was.alive & ~now.alive & going[:, None]  # a last observation is in the frame of a death
        self.absent[g.name] = ~was.alive & going[:, None]
        self.died[g.name] = (self.died[g.name] | left) & going[:, None]
        if any((a != b).flatten(2).any(-1)[dead].any() for a, b in zip(_wide(was.obs), _wide(now.obs), strict=True)):
            self.note("the dead", f"observations of {g.name!r} who are not there change: nobody learns from them.")

    def _require_finite(self, x: Tensor, what: str) -> None:
        if x.is_floating_point() and not x.isfinite().all():
            self.problem("finite", f"{what} is not finite: see where it divides, or takes a root or a logarithm.")


def require_tensor(x: Any, shape: tuple[int, ...], dtype: torch.dtype | None, what: str) -> None:
    if not isinstance(x, Tensor):
        raise BrokenError("frames", f"{what} is {form_of(x)}: it must be a tensor {list(shape)}.")
    if tuple(x.shape) != shape:
        raise BrokenError("frames", f"{what} has shape {list(x.shape)}: it must be {list(shape)}.")
    if dtype is not None and x.dtype != dtype:
        raise BrokenError("frames", f"{what} is {x.dtype}: it must be {dtype}.".replace("torch.", ""))


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same numbers."""

    def equal(x: Tensor, y: Tensor) -> bool:
        return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())

    return all(equal(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


def form_of(x: Any) -> str:
    """What something is, as one would say it."""
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return "nothing" if x is None else f"a {type(x).__name__}"


def random_players(spec: EnvSpec) -> Players:
    draw = generator(0, "check", "players")
    return Players(spec, [Random(Seat(spec, (g.name,), Random.Config(), NetConfig(), draw)) for g in spec.groups])


def _wide(obs: Any) -> list[Tensor]:
    return [x.flatten(2) if x.dim() > 2 else x[..., None] for x in tree_leaves(obs)]
