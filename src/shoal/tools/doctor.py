"""The doctor of `shoal check`: what it does in a process of its own, and tells as it goes."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.algos.base import Seat, fits
from shoal.algos.random import Random
from shoal.envs.base import Environment
from shoal.envs.rows import Row, Slots, arrays, in_words, parts
from shoal.envs.vector import Host
from shoal.flags import build
from shoal.ids import find
from shoal.nets.layers import NetConfig
from shoal.spec import Box, EnvSpec, Frame, Group, Outcome, UserError, tree_leaves, tree_map
from shoal.tools.raw import BrokenError, Level, Moment, Raw, chosen, copied, form_of, in_bytes, misfit, stranded
from shoal.training.collect import Collector, Players, play
from shoal.training.seeds import generator

AGAIN = 64  # steps that are played twice, and half of them after a resume
PATIENCE = 10.0  # seconds that a look lasts at most, whatever --steps says
SEEDS = 40  # seeds that two environments begin with
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


# --- in the process that looks ---------------------------------------------------------------------------------------


class HungError(BaseException):  # an environment that catches every Exception must not catch this
    pass


def look(line: Any, env: str, config: dict[str, Any], options: CheckOptions) -> None:
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
    faulthandler.disable()  # a crash is told in a sentence
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
            refused, env = e, stranded(e)
        if env is not None:
            self.met = True
            raw = Raw(env, self)
            self.walk_raw(raw)
            if refused is None and "seeding" not in self.found:
                with self.during("making another"):
                    other = cls.row(config)
                self.afresh(Begun(row), Begun(other))
                other.close()
            self.well(GOOD_RAW)
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
            active = {a: chosen(raw.moves[a].space, raw.mask(a, before), draw) for a in before.active}
            held = {a: (x, copied(x)) for a, x in before.obs.items()}
            now = raw.move(active)
            for a, (x, copy) in held.items():
                if a in now.obs and in_bytes(x) != in_bytes(copy):
                    why = "an observation that was handed out is written over by the next step"
                    self.note("arrays", f"{why} (that of {a}): Shoal copies it, other code may not; return a new array.")
            taken.append(active)
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

    def twice(self, raw: Raw, taken: list[dict[Any, np.ndarray]], digests: list[Any]) -> None:
        """The same seeds and actions again; another seed."""
        self.unseen |= {"repeatable"}
        now, again, episode = raw.reset(0), iter(digests), 0
        if now.digest != next(again):
            why = "the same seed gives another first observation each time"
            self.problem("seeding", f"{why}: draw from a generator that reset seeds (super().reset(seed=seed)).")
            return
        self.unseen -= {"repeatable"}
        for t, active in enumerate(taken, 1):
            now = raw.move(active)
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

    def afresh(self, one: Begun, other: Begun) -> None:
        """Two rows that were reset to different seeds before: that must not matter."""
        began = time.monotonic()
        for seed in range(SEEDS):
            if time.monotonic() - began > PATIENCE / 4:
                return
            with self.during("reset", times=4):
                one(seed + SEEDS)
                other(seed + 2 * SEEDS)
                same = one(seed) == other(seed)
            if not same:
                why = f"what was played before changes how seed {seed} begins"
                self.problem("seeding", f"{why}: let reset put everything back; else a run cannot be resumed as it was.")
                return

    def look_at(self, raw: Raw, before: Moment | None, now: Moment) -> None:
        """One moment of the raw object."""
        for a in (*now.obs, *now.there):
            if a not in raw.names:
                raise BrokenError("agents", f"{a!r} is not among the possible_agents: name everyone who may come.")
        for a, x in now.obs.items():
            if (wrong := misfit(x, raw.spaces[a], f"the observation of {a}")) is not None:
                self.find(*wrong)
        for a in now.active:
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
        env.checks_finite = False  # what is not finite is found here
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
        other = cls(config, rows=rows)
        other.checks_finite = False
        self.again(other, begin, tape, state)
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


class Begun:
    """A row of Shoal's, which is asked what it begins with."""

    def __init__(self, row: Row):
        self.row, self.whole = row, arrays(row, 1)
        self.out = Slots(row.spec, self.whole, 0, "new")

    def __call__(self, seed: int) -> list[bytes]:
        self.row.reset(seed, self.out)
        return [x.tobytes() for x in self.whole.values()]


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
            raise BrokenError("frames", f"{what} is {form_of(x)}: it must be a tensor {list(shape)}.")
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
            for flag in ("alive", "active", "start"):
                self.demand(getattr(v, flag), (rows, g.n), torch.bool, f"`{flag}` {of}")
            for name, shape in parts(g):
                x = v.obs[name] if isinstance(v.obs, dict) else v.obs
                self.demand(x, (rows, g.n, *shape), None, f"the observation {of}")
                self.finite(x[v.alive], f"an observation {of}")
                self.dtypes[g.name][name] = str(x.dtype).removeprefix("torch.")
                self.span((g.name, name), x)
            if (v.active & ~v.alive).any():
                self.problem("frames", f"`acts` {of} holds for some who are not alive: it is a part of `alive`.")
            if not self.spec.turns and not torch.equal(v.active, v.alive):
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
            was, now, new, pay = before[g.name], out.next[g.name], out.frame[g.name], out.results[g.name]
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
            learner_reward = torch.cat([out.results[g.name].reward for g in groups], -1)
            if (learner_reward != learner_reward[:, :1]).any():
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
    return Players(spec, [Random(Seat(spec, (g.name,), Random.Config(), NetConfig(), draw)) for g in spec.groups])


def why_not(cls: Any, spec: EnvSpec) -> str:
    try:
        fits(cls, spec, [g.name for g in spec.groups])
    except UserError as e:
        return str(e)
    return ""
