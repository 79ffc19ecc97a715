"""A doctor for environments: steps one with random legal actions, and says what it is, what was seen and what is wrong.

It looks twice. First at the raw object, where there is one (of Gymnasium's or PettingZoo's kind): what `reset` and `step`
return, against the spaces it declares. Then at the world that Shoal makes of it, or a native one: the contract of
`envs/base.py`.
A finding is `ok`, a `note` (it works; know it) or a `problem` (training on it goes wrong), and one sentence.

All this happens in a process of its own, which tells what it finds as it goes: an environment that hangs is interrupted where
it hangs, or killed; one that crashes takes nobody with it. What it prints on stdout is dropped.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shoal.algos.base import fits
from shoal.algos.random import Random
from shoal.envs.base import Environment
from shoal.envs.rows import in_words, parts
from shoal.envs.spaces import SIMPLE, Moves, kind_of
from shoal.envs.vector import Host
from shoal.flags import build
from shoal.ids import catalog, find
from shoal.log.console import short
from shoal.nets.layers import NetConfig
from shoal.spec import Box, EnvSpec, Frame, Group, Outcome, Space, UserError, tree_leaves, tree_map
from shoal.training.collect import Collector, Players, play
from shoal.training.seeds import generator

Level = Literal["ok", "note", "problem"]
MASK = "action_mask"
AGAIN = 64  # steps that are played twice, and half of them after a resume
PATIENCE = 10.0  # seconds that a look lasts at most, whatever --steps says
SPEED = 0.3  # seconds that a measurement of speed lasts
GRACE = 3.0  # seconds beyond the timeout after which the process is killed


@dataclass(frozen=True)
class CheckOptions:
    steps: int = 1000  # steps to take, in every row
    rows: int = 4  # rows of the world that Shoal makes of it
    timeout: float = 20.0  # seconds that it may take to be made, to reset or to step
    json: bool = False  # print one JSON value and nothing else

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "timeout"):
            if not 0 < getattr(self, name) <= 1e9:
                raise UserError(f"--{name} is {getattr(self, name)}: it must be more than zero.")


@dataclass(frozen=True)
class Finding:
    level: Level
    about: str  # a word or two: seeding, masks
    sentence: str


@dataclass
class Report:
    env: str
    summary: str = ""
    spec: EnvSpec | None = None  # none where it could not even be made
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)  # what was seen of each group
    seen: dict[str, Any] = field(default_factory=dict)  # episodes, how they ended, speed
    findings: list[Finding] = field(default_factory=list)

    def of(self, level: Level) -> list[Finding]:
        return [f for f in self.findings if f.level == level]

    @property
    def algorithms(self) -> dict[str, str]:
        """Those that learn -> why they cannot take this world; nothing where they can."""
        return {} if self.spec is None else {e.id: _why_not(e.load(), self.spec) for e in catalog("algos").values()}

    def as_json(self) -> dict[str, Any]:
        spec = self.spec
        world = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name != "groups"} if spec else None
        groups = {g.name: {**asdict(g), "action": repr(g.action), **self.groups.get(g.name, {})} for g in _groups(spec)}
        value = {"env": self.env, "summary": self.summary, "world": world, "groups": groups, "seen": self.seen}
        findings = [asdict(f) for f in self.findings]
        return {**value, "findings": findings, "algorithms": {a: why or None for a, why in self.algorithms.items()}}

    @property
    def group_rows(self) -> list[list[str]]:
        """As a table: group, team, agents, what they see, do and are paid."""
        return [[g.name, g.team, _names(g), *_sees(g, self.groups.get(g.name, {})), _does(g)] for g in _groups(self.spec)]

    @property
    def lines(self) -> list[list[str]]:
        """What else it is, what was seen and who can play it, each with a word before it."""
        spec, s = self.spec, self.seen
        assert spec is not None
        state = f"state of its own ({spec.state} numbers)" if spec.state else "no state of its own"
        traits = {"masks": any(g.masked for g in spec.groups), "turns": spec.turns, "common pay": spec.common}
        limit = f"at most {spec.horizon} steps an episode" if spec.horizon else "no limit to an episode that it tells of"
        out = [["it has", ", ".join([state, *(word if has else f"no {word}" for word, has in traits.items()), limit])]]
        if s:
            ends = f"{s['episodes']} episodes, {s['terminated']} terminated and {s['truncated']} truncated"
            lengths = f", of {_span(s['shortest'], s['longest'])} steps" if s["episodes"] else ""
            lives = f"{s['deaths']} early deaths, {s['arrivals']} late arrivals"
            out.append(["seen", f"{s['steps']:,} steps of {s['rows']} rows: {ends}{lengths}; {lives}"])
        rates = [f"{short(r)} steps/s {how}" for how, r in s.get("rates", {}).items()]
        out += [["speed", f"{', '.join(rates)}, played at random"]] if rates else []
        out.append(["plays it", ", ".join(a for a, why in self.algorithms.items() if not why) or "no algorithm"])
        return out + [["does not", f"{a}: {why}"] for a, why in self.algorithms.items() if why]


def check(env: str, options: CheckOptions | None = None, config: Mapping[str, Any] | None = None) -> Report:
    """Look at an environment by id or path, with its own settings."""
    options, report = options or CheckOptions(), Report(env)
    context = multiprocessing.get_context("fork")
    line, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_look, args=(theirs, env, dict(config or {}), options), name="shoal-check")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child uses one alone
        child.start()
    theirs.close()
    doing, patience, heard = "loading it", options.timeout, time.monotonic()
    try:
        while True:
            if line.poll(0.1):
                with suppress(EOFError):
                    heard, (word, what) = time.monotonic(), line.recv()
                    if word == "done":
                        return report
                    if word == "refused":
                        raise UserError(what)
                    if word == "failed":
                        raise RuntimeError(f"the check itself failed:\n{what}")
                    if word == "doing":
                        doing, patience = what
                    elif word == "finding":
                        report.findings.append(what)
                    else:
                        setattr(report, word, what)
                    continue
                child.join(GRACE)
            if not child.is_alive():
                how = _died(child.exitcode)
                sentence = f"the process {how} while {doing}: nothing that it calls may end the process."
                report.findings.append(Finding("problem", "crash", sentence))
                return report
            if time.monotonic() - heard > patience + GRACE:
                sentence = f"{doing} took longer than {patience:g} s and could not be interrupted: see what it waits for."
                report.findings.append(Finding("problem", "hang", sentence))
                return report
    finally:
        for end in (lambda: os.killpg(child.pid, signal.SIGKILL), child.kill, child.join):  # type: ignore[arg-type]
            with suppress(ProcessLookupError):
                end()
        line.close()


def _died(code: int | None) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"left with exit status {code}"


# --- in the process that looks ---------------------------------------------------------------------------------------


class BrokenError(Exception):
    """So wrong that a look ends here."""

    def __init__(self, about: str, sentence: str):
        super().__init__(sentence)
        self.about = about


class HungError(BaseException):  # an environment that catches every Exception must not catch this
    pass


def _look(line: Any, env: str, config: dict[str, Any], options: CheckOptions) -> None:
    """The whole life of that process."""

    def alarm(number: int, frame: Any) -> None:
        raise HungError

    os.setsid()  # so that all it starts can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, alarm)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        Doctor(line, options).examine(env, config)
        line.send(("done", None))
    except UserError as e:
        line.send(("refused", str(e)))
    except BrokenPipeError:  # whoever asked is gone
        pass
    except BaseException:
        line.send(("failed", traceback.format_exc()))
    finally:
        os._exit(0)


class Doctor:
    """Looks, and tells over `line`."""

    def __init__(self, line: Any, options: CheckOptions):
        self.line, self.options = line, options
        self.found: dict[str, Level] = {}
        self.told, self.doing = 0.0, ""
        self.met = False  # there is an environment: what is wrong from here on is wrong with it
        self.seen: dict[str, Any] = {}
        self.unseen: set[str] = set()  # what could not be looked at

    def find(self, level: Level, about: str, sentence: str) -> None:
        """The first of its kind."""
        if about not in self.found:
            self.found[about] = level
            self.line.send(("finding", Finding(level, about, sentence)))

    def problem(self, about: str, sentence: str) -> None:
        self.find("problem", about, sentence)

    def note(self, about: str, sentence: str) -> None:
        self.find("note", about, sentence)

    def well(self, good: dict[str, str]) -> None:
        """What was looked at and not complained of."""
        for about, sentence in good.items():
            if about not in self.unseen:
                self.find("ok", about, sentence)

    @contextmanager
    def during(self, doing: str, times: int = 1) -> Iterator[None]:
        """The environment's own code runs, perhaps several times: what it raises, and how long it takes, is about it."""
        patience = self.options.timeout * times
        if doing != self.doing or time.monotonic() - self.told > 0.5:
            self.line.send(("doing", (doing, patience)))
            self.told, self.doing = time.monotonic(), doing
        signal.setitimer(signal.ITIMER_REAL, patience)
        try:
            yield
        except (UserError, BrokenError):
            raise
        except HungError as e:
            *_, place, _ = traceback.extract_tb(e.__traceback__)
            at = f"{os.path.basename(place.filename)}, line {place.lineno}"
            why = f"{doing} took longer than {patience:g} s ({at})"
            raise BrokenError("hang", f"{why}: see what it waits for there, or give it more --timeout.") from None
        except (Exception, SystemExit) as e:
            raise BrokenError("exception", f"{doing} raised {in_words(e)}: mend it there.") from e
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def examine(self, id: str, config: dict[str, Any]) -> None:
        try:
            with self.during("loading it"):
                entry = find("envs", id)
                cls = entry.load()
                made = build(cls.Config, {**entry.settings, **config}, "env")
                self.line.send(("summary", f"by way of {entry.path.name}" if entry.rest else entry.summary))
            if entry.note:
                self.note("name", entry.note)
            if issubclass(cls, Host):
                made = replace(made, workers=0, timeout=self.options.timeout)
                self.raw(cls, made)
            self.world(cls, made)
        except BrokenError as e:
            self.problem(e.about, str(e))
        except UserError as e:
            if e.__cause__ is None and not self.met:  # what was asked for is wrong
                raise
            self.problem("refused", str(e))
        except Exception as e:
            if not self.met or isinstance(e, BrokenPipeError):
                raise
            self.problem("form", f"what it returned could not be read: {in_words(e)}.")

    # --- the raw object ---

    def raw(self, cls: Any, config: Any) -> None:
        """Step what the library or the user wrote. It ends the examination where there is no use in going on."""
        refused: UserError | BrokenError | None = None
        try:
            with self.during("making it"):
                row = cls.row(config)
            self.line.send(("spec", row.spec))
            env = getattr(row, "env", None)
        except (UserError, BrokenError) as e:
            refused, env = e, _stranded(e)
        if env is not None:
            self.met = True
            self.walk_raw(Raw(env, self))
        if refused is not None:  # and nothing was found that explains it, or it would not have come so far
            raise refused
        row.close()

    def walk_raw(self, raw: Raw) -> None:
        draw, began = generator(0, "check", "raw"), time.monotonic()
        taken: list[dict[Any, np.ndarray]] = []
        episode, first = 0, raw.reset(0)
        self.look_at(raw, None, first)
        digests, before, dead = [first.digest], first, set[Any]()
        for _ in range(self.options.steps):
            if time.monotonic() - began > PATIENCE:
                break
            acts = {a: _choose(raw.moves[a].space, raw.mask(a, before), draw) for a in before.acts}
            held = {a: (x, _copy(x)) for a, x in before.obs.items()}
            now = raw.move(acts)
            for a, (x, copy) in held.items():
                if a in now.obs and _bytes(x) != _bytes(copy):
                    why = "an observation that was handed out is written over by the next step"
                    self.note("arrays", f"{why} (that of {a}): Shoal copies it, other code may not; return a new array.")
            taken.append(acts)
            digests.append(now.digest)
            self.look_at(raw, before, now)
            back = [a for a in now.there if a in dead]
            if back:
                self.problem("lives", f"{back[0]} came back from the dead: who terminated or was truncated stays out.")
            dead |= {a for a in now.terminated if now.terminated[a] or now.truncated.get(a)}
            before = now
            if now.over:
                episode, dead = episode + 1, set()
                before = raw.reset(episode)
                digests.append(before.digest)
                self.look_at(raw, None, before)
        self.twice(raw, taken[:AGAIN], digests)
        if "rgb_array" not in ((getattr(raw.env, "metadata", None) or {}).get("render_modes") or ()):
            self.note("pictures", "it has no render mode rgb_array: shoal watch cannot film it.")
        self.well(GOOD_RAW)

    def twice(self, raw: Raw, taken: list[dict[Any, np.ndarray]], digests: list[Any]) -> None:
        """The same seeds and actions again; another seed."""
        self.unseen |= {"repeatable"}
        now, again, episode = raw.reset(0), iter(digests), 0
        if now.digest != next(again):
            why = "the same seed gives another first observation each time"
            self.problem("seeding", f"{why}: draw from a generator that reset seeds (super().reset(seed=seed)).")
            return
        self.unseen -= {"repeatable"}
        for t, acts in enumerate(taken, 1):
            now = raw.move(acts)
            same = now.digest == next(again)
            if now.over and same:
                episode += 1
                same = raw.reset(episode).digest == next(again)
            if not same:
                why = f"the same seed and actions led elsewhere at step {t}"
                what = "draw from a generator that reset seeds, and let reset put everything back"
                self.problem("repeatable", f"{why}: {what}; else a run cannot be resumed as it was.")
                return
        if len({raw.reset(seed).digest for seed in range(5)}) == 1:
            self.note("starts", "five seeds gave one and the same first observation: it always begins alike.")

    def look_at(self, raw: Raw, before: Moment | None, now: Moment) -> None:
        """One moment of the raw object."""
        for a in (*now.obs, *now.there):
            if a not in raw.names:
                raise BrokenError("agents", f"{a!r} is not among the possible_agents: name everyone who may come.")
        for a, x in now.obs.items():
            if (wrong := misfit(x, raw.spaces[a], f"the observation of {a}")) is not None:
                self.find(*wrong)
        for a in now.acts:
            mask = raw.mask(a, now)
            sizes = getattr(raw.moves[a].space, "sizes", None)
            if mask is None or sizes is None:
                continue
            if mask.size != sum(sizes):
                text = f"the action mask of {a} has {mask.size} entries and the agent {sum(sizes)} choices: make them as many."
                raise BrokenError("masks", text)
            if not all(x.any() for x in np.split(mask, np.cumsum(sizes)[:-1])):
                self.problem("masks", f"the action mask of {a} forbids everything: allow at least one choice.")
        if before is None:
            for a in now.there:
                if a not in now.obs:
                    self.problem("observations", f"reset gave {a} no observation: give one to all in env.agents.")
            return
        for a in before.there:
            self._ending(a, now)
            reward = now.rewards.get(a, self)
            if reward is self:
                text = f"the reward of {a} is missing in a step that it began alive"
                self.problem("rewards", f"{text}: pay everyone who was there before the step, above all in the last one.")
            elif not isinstance(reward, int | float | np.number | np.ndarray) or np.size(reward) != 1:
                kind = type(reward).__name__
                raise BrokenError("rewards", f"the reward of {a} is {reward!r:.40} ({kind}): it must be a number.")
            elif not np.isfinite(reward):
                self.problem("finite", f"a reward of {a} is {float(reward)}: rewards must be finite.")

    def _ending(self, a: Any, now: Moment) -> None:
        """Flags and last observation of one that was there before the step."""
        for name, flags in (("terminated", now.terminated), ("truncated", now.truncated)):
            if a not in flags:
                self.problem("flags", f"{name} does not mention {a}, who was there before the step: say true or false.")
            elif not isinstance(flags[a], bool | np.bool_):
                kind = type(flags[a]).__name__
                self.note("flags", f"{name} is {flags[a]!r:.40} ({kind}) for {a}: make it True or False.")
        ended, cut = bool(now.terminated.get(a)), bool(now.truncated.get(a))
        if ended and cut:
            self.note("both", f"terminated and truncated were both true for {a}: Shoal takes it for terminated.")
        if a not in now.obs and not ended:
            text = f"{a} was truncated without a last observation" if cut else f"{a} has no observation although it goes on"
            self.problem("observations", f"{text}: give it one, its value is reckoned from there.")
        if a not in now.there and not ended and not cut:
            self.problem("lives", f"{a} left without having terminated or been truncated: set one of the two.")

    # --- the world ---

    @torch.no_grad()
    def world(self, cls: Any, config: Any) -> None:
        rows = self.options.rows
        with self.during("making the world", rows + 1):
            env = cls(config, rows=rows)
        self.met = True
        self.line.send(("spec", env.spec))
        draw, players = generator(0, "check"), _players(env.spec)
        watch, began = Watch(self, env), time.monotonic()
        begin = torch.rand(rows, env.noise, generator=draw)
        with self.during("reset", 2 * rows):  # rows may be made only now
            frame = env.reset(begin)
        watch.first(frame)
        tape: list[tuple[Any, ...]] = [(tree_map(torch.clone, frame), None, None)]
        state: Any = None
        for t in range(self.options.steps):
            if time.monotonic() - began > PATIENCE:
                break
            noise = torch.rand(rows, env.noise, generator=draw)
            actions, _, _ = players.act(frame, players.memory(rows, env.device), players.noise(draw, rows), explore=True)
            if t == AGAIN // 2:
                with self.during("get_state"):
                    state = env.get_state()
            kept = tree_map(torch.clone, frame)
            with self.during("step", rows):
                outcome = play(env, actions, noise)
            if not same(kept, frame):
                self.problem("tensors", "a frame that was handed out is written over by the next step: give new tensors.")
            watch.after(frame, outcome)
            if t < AGAIN:
                tape.append((tree_map(torch.clone, outcome), actions, noise))
            frame = outcome.frame
        watch.tell()
        self.again(cls(config, rows=rows), begin, tape, state)
        for sentence in env.news:
            self.note(f"news {len(self.found)}", sentence)
        env.close()
        self.well(GOOD_WORLD)
        self.speed(cls, config)

    def again(self, env: Environment, begin: Tensor, tape: list[tuple[Any, ...]], state: Any) -> None:
        """The same noise and actions in a world made afresh; and once more from the state in the middle."""
        what = "make all of it follow from the noise, the actions and the state"
        self.unseen |= {"repeatable", "starts", "exact resume"}
        with self.during("reset", 5 * env.rows):
            if not same(env.reset(begin), tape[0][0]):
                self.problem("seeding", f"the same noise gives another first frame: {what}.")
                return
            self.unseen -= {"repeatable", "starts"} if env.noise else {"repeatable"}
            if env.noise and same(env.reset((begin + 0.5) % 1), tape[0][0]):
                self.note("starts", "other noise gives the same first frame: it always begins alike.")
            env.reset(begin)

        def differs(tape: list[tuple[Any, ...]]) -> bool:
            with self.during("step", len(tape) * env.rows):
                return not all(same(play(env, actions, noise), then) for then, actions, noise in tape)

        if differs(tape[1:]):
            self.problem("repeatable", f"the same noise and actions led elsewhere: {what}.")
        elif state is not None:
            said = len(env.news)
            self.unseen -= {"exact resume"}
            with self.during("set_state", AGAIN * env.rows):
                frame = env.set_state(state)
            middle = tape[AGAIN // 2][0].frame
            if len(env.news) > said or not same(frame, middle) or differs(tape[AGAIN // 2 + 1 :]):
                text = "what follows set_state(get_state()) is not what followed then: a run on it cannot be resumed as it was"
                self.problem("exact resume", f"{text}; put everything that matters into the state.")
        env.close()

    def speed(self, cls: Any, config: Any) -> None:
        ways = {"in one process": config}
        if issubclass(cls, Host):
            ways["with workers"] = replace(config, workers="auto")
        rates = {}
        for how, c in ways.items():
            with self.during(f"stepping {how}", 10 * self.options.rows):
                env = cls(c, rows=self.options.rows)
                collector = Collector(env, _players(env.spec), generator(0, "speed"))
                collector.collect(1)
                steps, began = 0, time.perf_counter()
                while (passed := time.perf_counter() - began) < SPEED:
                    collector.collect(5)
                    steps += 5 * env.rows
                rates[how] = steps / passed
                env.close()
        self.seen = {**self.seen, "rates": rates}
        self.line.send(("seen", self.seen))


GOOD_RAW = {
    "observations": "observations are in their declared spaces.",
    "dtypes": "observations have the declared dtypes.",
    "finite": "observations and rewards are finite.",
    "rewards": "rewards are numbers, for everyone who was there.",
    "flags": "terminated and truncated are given for everyone who was there.",
    "lives": "nobody comes back or leaves without a reason.",
    "arrays": "observations are new arrays.",
    "seeding": "the same seed begins alike.",
    "repeatable": "the same seed and actions lead to the same places.",
}
GOOD_WORLD = {
    "frames": "frames and outcomes have the declared shapes and dtypes.",
    "starts": "other noise, other starts.",
    "start flags": "agents start where they come, and nowhere else.",
    "ends": "episodes end.",
    "tensors": "frames are new tensors.",
    "next": "next and frame are alike but for the rows that are over.",
    "finite": "observations and rewards are finite.",
    "seeding": "the same noise begins alike.",
    "repeatable": "the same noise and actions lead to the same places.",
    "exact resume": "it goes on from a state as it did.",
}


# --- the raw object, whatever its kind: everything by agent ------------------------------------------------------------


@dataclass
class Moment:
    """What a reset or a step returned."""

    obs: dict[Any, Any]
    infos: Mapping[Any, Any]
    there: list[Any]  # who is in the game now
    acts: list[Any]  # who is to move
    rewards: Mapping[Any, Any] = field(default_factory=dict)
    terminated: Mapping[Any, Any] = field(default_factory=dict)
    truncated: Mapping[Any, Any] = field(default_factory=dict)
    over: bool = False

    def __post_init__(self) -> None:
        whole = _bytes(self.obs), repr((self.rewards, self.terminated, self.truncated, self.there))
        self.digest = hashlib.sha1(repr(whole).encode()).hexdigest()


class Raw:
    def __init__(self, env: Any, doctor: Doctor):
        self.env, self.doctor = env, doctor
        self.in_turn, self.by_name = hasattr(env, "agent_iter"), hasattr(env, "possible_agents")
        with doctor.during("giving its spaces"):
            if self.by_name:
                self.names = list(env.possible_agents)
                self.spaces = {a: env.observation_space(a) for a in self.names}
                actions = {a: env.action_space(a) for a in self.names}
            else:
                both = env.observation_space, env.action_space
                inner = getattr(env, "unwrapped", env)
                self.tuples = all(kind_of(s) == "Tuple" and len(s.spaces) == getattr(inner, "n_agents", 0) for s in both)
                spaces = [tuple(s.spaces) if self.tuples else (s,) for s in both]
                self.names = [f"agent_{i}" for i in range(len(spaces[0]))]
                self.spaces, actions = (dict(zip(self.names, s, strict=True)) for s in spaces)
            self.moves = {a: Moves(s) for a, s in actions.items()}

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self.doctor.during(name):
            return getattr(self.env, name)(*args, **kwargs)

    def reset(self, seed: int) -> Moment:
        answer = self.call("reset", seed=seed)
        if self.in_turn:
            return self._moment_in_turn([])
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise BrokenError("form", f"reset returned {_form(answer)}: it must return two things, observation and info.")
        obs, infos = answer
        if self.by_name:
            self._named("reset", observations=obs, infos=infos)
            return Moment(dict(obs), infos, list(self.env.agents), list(self.env.agents))
        return Moment(self._each(obs), {self.names[0]: infos}, self.names, self.names)

    def move(self, actions: dict[Any, np.ndarray]) -> Moment:
        moves = {a: self.moves[a].read(x) for a, x in actions.items()}
        if self.in_turn:
            return self._step_in_turn(moves)
        taken = moves if self.by_name else tuple(moves.values()) if self.tuples else moves[self.names[0]]
        answer = self.call("step", taken)
        if not isinstance(answer, tuple) or len(answer) != 5:
            text = f"step returned {_form(answer)}: it must return five things"
            raise BrokenError("form", f"{text}, observation, reward, terminated, truncated and info.")
        obs, rewards, terminated, truncated, infos = answer
        if self.by_name:
            self._named("step", observations=obs, rewards=rewards, terminations=terminated, truncations=truncated)
            there = [a for a in self.env.agents if not terminated.get(a) and not truncated.get(a)]
            return Moment(dict(obs), infos, there, there, rewards, terminated, truncated, not there)
        over = bool(np.all(terminated) or np.any(truncated))
        each = [self._each(x) if self.tuples and np.ndim(x) else dict.fromkeys(self.names, x) for x in answer[1:4]]
        paid, ends, cuts = each
        there = [] if over else self.names
        return Moment(self._each(obs), {self.names[0]: infos}, there, there, paid, ends, cuts, over)

    def _each(self, x: Any) -> dict[Any, Any]:
        if not self.tuples:
            return {self.names[0]: x}
        if len(x) != len(self.names):
            raise BrokenError("form", f"it returned {len(x)} things for {len(self.names)} agents: one each.")
        return dict(zip(self.names, x, strict=True))

    def _named(self, call: str, **given: Any) -> None:
        for name, x in given.items():
            if not isinstance(x, Mapping):
                raise BrokenError("form", f"the {name} that {call} returned are {_form(x)}: they must be a dict by agent.")

    def _step_in_turn(self, moves: dict[Any, Any]) -> Moment:
        """A move, and the leaving of those that it ended."""
        env = self.env
        mover = env.agent_selection
        before = list(env.agents)
        self.call("step", moves[mover])
        rewards, ends, cuts = dict(env.rewards), dict(env.terminations), dict(env.truncations)
        last = {a: self.call("observe", a) for a in env.agents if ends.get(a) or cuts.get(a)}
        for _ in before:
            if not env.agents or not (env.terminations.get(env.agent_selection) or env.truncations.get(env.agent_selection)):
                break
            self.call("step", None)
        else:
            if env.agents:
                raise BrokenError("lives", "the dead do not leave when they are stepped with None: call _was_dead_step.")
        now = self._moment_in_turn([a for a in before if ends.get(a) or cuts.get(a)])
        return replace(now, obs={**last, **now.obs}, rewards=rewards, terminated=ends, truncated=cuts, over=not now.there)

    def _moment_in_turn(self, gone: list[Any]) -> Moment:
        env = self.env
        there = [a for a in env.agents if a not in gone]
        obs = {a: self.call("observe", a) for a in there}
        return Moment(obs, env.infos, there, [env.agent_selection] if there else [])

    def mask(self, agent: Any, moment: Moment) -> np.ndarray | None:
        """Choices that are allowed, end to end; none: all."""
        seen, info = moment.obs.get(agent), moment.infos.get(agent) if isinstance(moment.infos, Mapping) else None
        inside = self.by_name and kind_of(self.spaces[agent]) == "Dict" and MASK in self.spaces[agent].spaces
        given = seen[MASK] if inside and isinstance(seen, Mapping) and MASK in seen else (info or {}).get(MASK)
        if given is None:
            return None
        return np.concatenate([np.ravel(m) for m in given] if isinstance(given, tuple | list) else [np.ravel(given)]) != 0


def misfit(x: Any, space: Any, what: str) -> tuple[Level, str, str] | None:
    """How an observation is not of its space: level, what about, sentence."""
    kind = kind_of(space)
    if kind in ("Dict", "Tuple"):
        inner = dict(space.spaces) if kind == "Dict" else dict(enumerate(space.spaces))
        given = dict(x) if isinstance(x, Mapping) else dict(enumerate(x)) if isinstance(x, tuple | list) else {}
        if set(given) != set(inner):
            has = ", ".join(map(str, given)) or _form(x)
            return (
                "problem",
                "observations",
                f"{what} is {has} where its space has {', '.join(map(str, inner))}: make them alike.",
            )
        return next((w for k, s in inner.items() if (w := misfit(given[k], s, f"{what}, part {k},"))), None)
    if kind not in SIMPLE:
        return None
    try:
        a = np.asarray(x)
    except ValueError:
        a = np.empty(0, object)
    if a.dtype.kind not in "biuf":
        return "problem", "observations", f"{what} is {_form(x)}, which is not made of numbers: return an array."
    if a.shape != tuple(space.shape):
        return "problem", "observations", f"{what} has shape {a.shape} and its space {tuple(space.shape)}: make them alike."
    if not np.isfinite(a).all():
        return "problem", "finite", f"{what} has {_first(a, ~np.isfinite(a))} in it: observations must be finite."
    low, high = _bounds(space)
    slack = 1e-6 * (1 + np.abs(a)) if a.dtype.kind == "f" else 0
    outside = (a < low - slack) | (a > high + slack)
    if outside.any():
        span = f"{_first(low + 0 * a, outside)} to {_first(high + 0 * a, outside)}"
        value = _first(a, outside)
        return "problem", "observations", f"{what} has {value} in it where its space says {span}: widen the space or clip."
    if kind != "Discrete" and a.dtype != space.dtype:
        fine = np.can_cast(a.dtype, space.dtype, "same_kind")
        text = f"{what} is {a.dtype} where its space says {space.dtype}"
        rest = "Shoal converts it; make them alike." if fine else "numbers are lost when it is converted; make them alike."
        return "note" if fine else "problem", "dtypes", f"{text}: {rest}"
    return None


def _bounds(space: Any) -> tuple[Any, Any]:
    kind = kind_of(space)
    if kind == "Box":
        return space.low, space.high
    start = getattr(space, "start", 0)
    return (0, 1) if kind == "MultiBinary" else (start, start + (space.n if kind == "Discrete" else space.nvec) - 1)


def _first(a: Any, where: np.ndarray) -> str:
    return f"{np.asarray(a)[where].flat[0]:.6g}"


def _choose(space: Space, mask: np.ndarray | None, draw: torch.Generator) -> np.ndarray:
    """A legal action, in the space's own units."""
    if isinstance(space, Box):
        u = torch.rand(len(space.low), generator=draw).numpy()
        return (np.array(space.low) + u * (np.array(space.high) - np.array(space.low))).astype(np.float32)
    chances = torch.ones(sum(space.sizes)) if mask is None else torch.from_numpy(mask).float()
    each = [x if x.any() else torch.ones_like(x) for x in chances.split(space.sizes)]
    picks = [int(torch.multinomial(x, 1, generator=draw)) for x in each]
    return np.array(picks if space.shape else picks[0])


def _stranded(e: BaseException | None) -> Any:
    """The raw object, where making a row of it failed: some function on the way held it."""
    while e is not None:
        for frame, _ in traceback.walk_tb(e.__traceback__):
            env = frame.f_locals.get("env")
            if hasattr(env, "reset") and hasattr(env, "step"):
                return env
        e = e.__cause__
    return None


def _copy(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {k: _copy(v) for k, v in x.items()}
    return [_copy(v) for v in x] if isinstance(x, tuple | list) else np.array(x)


def _bytes(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {k: _bytes(v) for k, v in x.items()}
    if isinstance(x, tuple | list):
        return [_bytes(v) for v in x]
    a = np.asarray(x)
    return repr(x) if a.dtype.kind == "O" else a.tobytes()


def _form(x: Any) -> str:
    """What something is, as one would say it."""
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return "nothing" if x is None else f"a {type(x).__name__}"


# --- the world ---------------------------------------------------------------------------------------------------------


class Watch:
    """Holds frames and outcomes against the contract, and remembers what it saw."""

    def __init__(self, doctor: Doctor, env: Environment):
        self.doctor, self.env, self.spec = doctor, env, env.spec
        self.problem, self.note = doctor.problem, doctor.note
        self.low, self.high = {}, {}  # type: dict[Any, Tensor], dict[Any, Tensor]
        self.dtypes: dict[str, dict[str, str]] = {g.name: {} for g in env.spec.groups}
        self.died = {g.name: torch.zeros(env.rows, g.n, dtype=torch.bool) for g in env.spec.groups}  # in this episode
        self.away = {g: torch.zeros_like(x) for g, x in self.died.items()}  # not there in the frame before the last
        self.lengths, self.ended = torch.zeros(env.rows, dtype=torch.long), []  # type: Tensor, list[int]
        self.count = {"steps": 0, "episodes": 0, "terminated": 0, "truncated": 0, "deaths": 0, "arrivals": 0}

    def demand(self, x: Any, shape: tuple[int, ...], dtype: Any, what: str) -> None:
        if not isinstance(x, Tensor):
            raise BrokenError("frames", f"{what} is {_form(x)}: it must be a tensor {list(shape)}.")
        if tuple(x.shape) != shape:
            raise BrokenError("frames", f"{what} has shape {list(x.shape)}: it must be {list(shape)}.")
        if dtype is not None and x.dtype != dtype:
            raise BrokenError("frames", f"{what} is {x.dtype}: it must be {dtype}.".replace("torch.", ""))

    def frame(self, frame: Frame, what: str) -> None:
        rows = self.env.rows
        if set(frame.views) != {g.name for g in self.spec.groups}:
            raise BrokenError("frames", f"{what} has views of {', '.join(frame.views)}: it must have one of each group.")
        for g in self.spec.groups:
            v, of = frame[g.name], f"of {g.name!r} in {what}"
            for flag in ("alive", "acts", "start"):
                self.demand(getattr(v, flag), (rows, g.n), torch.bool, f"`{flag}` {of}")
            for name, shape in parts(g):
                x = v.obs[name] if isinstance(v.obs, dict) else v.obs
                self.demand(x, (rows, g.n, *shape), None, f"the observation {of}")
                self.finite(x[v.alive], f"an observation {of}")
                self.dtypes[g.name][name] = str(x.dtype).removeprefix("torch.")
                self.span((g.name, name), x)
            if (v.acts & ~v.alive).any():
                self.problem("frames", f"`acts` {of} holds for some who are not alive: it is a part of `alive`.")
            if not self.spec.turns and not torch.equal(v.acts, v.alive):
                self.problem("frames", f"`acts` {of} is not `alive`, and the spec has no turns: set turns=True there.")
            if not (g.mortal or self.spec.turns or v.alive.all()):
                self.problem("frames", f"some {of} are not alive, and the group is not mortal: set mortal=True there.")
            if g.masked != (v.legal is not None):
                raise BrokenError("masks", f"`legal` {of} is {'missing' if g.masked else 'given'}: see `masked` in the spec.")
            if v.legal is not None and not isinstance(g.action, Box):
                self.demand(v.legal, (rows, g.n, sum(g.action.sizes)), torch.bool, f"`legal` {of}")
                if not all(x.any(-1).all() for x in v.legal.split(g.action.sizes, -1)):
                    raise BrokenError("masks", f"`legal` {of} forbids everything to somebody: allow at least one choice.")
        if self.spec.state is None and frame.state is not None:
            raise BrokenError("frames", f"{what} has a state, and the spec says it has none.")
        if self.spec.state is not None:
            self.demand(frame.state, (rows, self.spec.state), None, f"the state in {what}")
            self.finite(frame.state, f"the state in {what}")  # type: ignore[arg-type]

    def first(self, frame: Frame) -> None:
        self.frame(frame, "the first frame")
        for g in self.spec.groups:
            if not torch.equal(frame[g.name].start, frame[g.name].alive):
                self.problem("start flags", f"`start` of {g.name!r} does not hold for all who are there after reset.")

    def after(self, before: Frame, out: Outcome) -> None:
        rows = self.env.rows
        self.frame(out.next, "`next`")
        self.frame(out.frame, "`frame`")
        self.demand(out.over, (rows,), torch.bool, "`over`")
        if set(out.stats) != set(self.spec.stats):
            raise BrokenError("frames", f"stats are {', '.join(out.stats) or 'none'}, and not those that the spec names.")
        for name, x in out.stats.items():
            self.demand(x, (rows,), None, f"the stat {name!r}")
        going = ~out.over
        if not same(tree_map(lambda x: x[going], out.next), tree_map(lambda x: x[going], out.frame)):
            self.problem("next", "`frame` differs from `next` in rows that are not over: it is `next` there.")
        self.lengths += 1
        left = torch.zeros(rows, dtype=torch.bool)  # somebody was there to the end and had not terminated
        someone = torch.zeros(rows, dtype=torch.bool)
        for g in self.spec.groups:
            was, now, new, pay = before[g.name], out.next[g.name], out.frame[g.name], out.pays[g.name]
            self.pay(g, pay, was.alive)
            left |= (was.alive & ~pay.terminated).any(-1)
            someone |= now.alive.any(-1)
            came, gone = now.alive & ~was.alive, was.alive & ~now.alive
            if not torch.equal(now.start[going], came[going]) or not torch.equal(new.start[out.over], new.alive[out.over]):
                text = f"`start` of {g.name!r} is not what it should be"
                self.problem("start flags", f"{text}: true in an agent's first frame, and in no other.")
            if (pay.terminated & now.alive)[going].any():
                self.problem("lives", f"some of {g.name!r} terminated and are still alive in `next`: who ended is gone.")
            if (came & self.died[g.name])[going].any():
                self.note("return", f"agents of {g.name!r} come back after they died: each time as a new one.")
            dead = self.away[g.name] & ~was.alive & ~now.alive & going[:, None]  # the frame of a death has its last look
            self.away[g.name] = ~was.alive & going[:, None]
            if any((a != b).flatten(2).any(-1)[dead].any() for a, b in zip(_seen(was), _seen(now), strict=True)):
                self.note("the dead", f"observations of {g.name!r} who are not there change: nobody learns from them.")
            self.count["deaths"] += int(gone[going].sum())
            self.count["arrivals"] += int(came[going].sum())
            self.died[g.name] = (self.died[g.name] | gone) & going[:, None]
        if (~someone & going).any():
            self.problem("ends", "everybody is gone and the row is not over: set `over` when the last one leaves.")
        if self.spec.horizon and (self.lengths > self.spec.horizon).any():
            text = f"an episode is longer than the {self.spec.horizon} steps that the spec names as its horizon"
            self.problem("horizon", f"{text}: cut it off there, or name the right number.")
        if self.spec.common:
            self.alike(out)
        self.count["steps"] += 1
        self.count["episodes"] += int(out.over.sum())
        self.count["truncated"] += int((out.over & left).sum())
        self.count["terminated"] += int((out.over & ~left).sum())
        self.ended += self.lengths[out.over].tolist()
        self.lengths[out.over] = 0

    def pay(self, g: Group, pay: Any, there: Tensor) -> None:
        shape = (self.env.rows, g.n)
        for name in ("reward", "terminated", "shaping"):
            if (x := getattr(pay, name)) is not None:
                self.demand(x, shape, torch.bool if name == "terminated" else None, f"`{name}` of {g.name!r}")
        self.finite(pay.reward, f"a reward of {g.name!r}")
        self.span((g.name, None), pay.reward)
        if (pay.terminated & ~there).any():
            self.problem("lives", f"some of {g.name!r} terminated who were not there before the step.")
        if (pay.reward[~there] != 0).any():
            self.note("ghosts", f"some of {g.name!r} are paid in steps that they did not begin alive.")

    def alike(self, out: Outcome) -> None:
        for groups in self.spec.teams.values():
            paid = torch.cat([out.pays[g.name].reward for g in groups], -1)
            if (paid != paid[:, :1]).any():
                self.problem("common pay", "agents of a team are paid unlike, and the spec says common=True: it is false.")

    def finite(self, x: Tensor, what: str) -> None:
        if x.is_floating_point() and not x.isfinite().all():
            self.problem("finite", f"{what} is not finite: see where it divides, or takes a root or a logarithm.")

    def span(self, key: Any, x: Tensor) -> None:
        low, high = x.amin(0), x.amax(0)  # over the rows
        self.low[key] = torch.minimum(self.low.get(key, low), low)
        self.high[key] = torch.maximum(self.high.get(key, high), high)

    def tell(self) -> None:
        """What was seen."""
        seen: dict[str, Any] = {}
        for g in self.spec.groups:
            spans = {n: (_number(self.low[g.name, n].min()), _number(self.high[g.name, n].max())) for n, _ in parts(g)}
            reward = (_number(self.low[g.name, None].min()), _number(self.high[g.name, None].max()))
            seen[g.name] = {"dtypes": self.dtypes[g.name], "range": spans, "reward_range": reward}
            still = [self.low[g.name, n] == self.high[g.name, n] for n, _ in parts(g)]
            count, total = sum(int(x.sum()) for x in still), sum(x.numel() for x in still)
            if count:
                text = "nothing" if count == total else f"{total - count} of {total} numbers"
                what = "all are constant" if count == total else "the others are constant"
                self.note("constant", f"in what {g.name!r} sees, {text} ever changed: {what}.")
            if reward[0] is not None and reward[0] == reward[1]:
                self.note("pay", f"{g.name!r} was always paid {reward[0]:g}: at random it never earned anything else.")
        self.doctor.line.send(("groups", seen))
        lengths = {"shortest": min(self.ended, default=None), "longest": max(self.ended, default=None)}
        self.doctor.seen = {**self.count, **lengths, "rows": self.env.rows}
        self.doctor.line.send(("seen", self.doctor.seen))
        self._ends()

    def _ends(self) -> None:
        steps, horizon = self.count["steps"], self.spec.horizon
        if self.count["episodes"]:
            return
        if horizon and horizon > steps:
            self.note("ends", f"no episode ended in {steps} steps, and one may have {horizon}: look on with --steps.")
        else:
            text = f"no episode ended in {steps} steps: it never truncates"
            self.problem("ends", f"{text}; give it a limit of time (or look on with --steps), for evaluations wait for ends.")


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same numbers."""

    def alike(x: Tensor, y: Tensor) -> bool:
        return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())

    return all(alike(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


def _number(x: Tensor) -> float | None:
    """None where it is not finite, which JSON has no word for."""
    return float(x) if x.isfinite() else None


def _seen(view: Any) -> list[Tensor]:
    return [x.flatten(2) if x.dim() > 2 else x[..., None] for x in tree_leaves(view.obs)]


def _players(spec: EnvSpec) -> Players:
    draw = generator(0, "check", "players")
    return Players(spec, [Random(spec, (g.name,), Random.Config(), NetConfig(), draw) for g in spec.groups])


def _why_not(cls: Any, spec: EnvSpec) -> str:
    try:
        fits(cls, spec, [g.name for g in spec.groups])
    except UserError as e:
        return str(e)
    return ""


# --- as it is printed --------------------------------------------------------------------------------------------------


def _groups(spec: EnvSpec | None) -> tuple[Group, ...]:
    return spec.groups if spec else ()


def _names(g: Group) -> str:
    return g.agents[0] if g.n == 1 else f"{g.agents[0]} ... {g.agents[-1]} ({g.n})"


def _sees(g: Group, seen: dict[str, Any]) -> list[str]:
    """What it sees, and what it was paid."""
    words = []
    for name, shape in parts(g):
        size = " x ".join(map(str, shape))
        dtype, span = seen.get("dtypes", {}).get(name, ""), seen.get("range", {}).get(name)
        words.append(" ".join(w for w in (name, size, dtype, f"in {_span(*span)}" if span else "") if w))
    return [", ".join(words), _span(*seen["reward_range"]) if seen else ""]


def _does(g: Group) -> str:
    if isinstance(g.action, Box):
        return f"{len(g.action.low)} numbers in {_span(min(g.action.low), max(g.action.high))}"
    return f"choice of {' x '.join(map(str, g.action.sizes))}"


def _span(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "numbers that are not finite"
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
