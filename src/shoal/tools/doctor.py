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

import torch
from torch import Tensor

from shoal.algos.checks import fits
from shoal.envs.base import Environment
from shoal.envs.rows import in_words, parts
from shoal.envs.vector import Host
from shoal.flags import build
from shoal.ids import find
from shoal.spec import EnvSpec, Frame, Outcome, UserError
from shoal.tools.contract import BrokenError, Contract, Findings, random_players
from shoal.tools.raw import stranded
from shoal.tools.rawcheck import RawCheck
from shoal.training.halves import make_collector
from shoal.training.seeds import generator

PATIENCE = 10.0  # seconds that each of the two checks steps at most, whatever --steps says
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


# --- in the process of the check -------------------------------------------------------------------------------------


class HungError(BaseException):  # an environment that catches every Exception must not catch this
    pass


def run_check(line: Any, env: str, config: dict[str, Any], options: CheckOptions) -> None:
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
    """Checks, and sends what it finds over `line`."""

    def __init__(self, line: Any, options: CheckOptions):
        self.line, self.options = line, options
        self.findings = Findings(lambda finding: line.send(("finding", finding)))
        self.sent, self.doing = 0.0, ""  # when the other side last heard what is being done, and what
        self.made = False  # there is an environment: what is wrong from here on is wrong with it

    def confirm(self, good: dict[str, str], unchecked: set[str]) -> None:
        """What was checked and not complained of."""
        for about, sentence in good.items():
            if about not in unchecked:
                self.findings.add("ok", about, sentence)

    @contextmanager
    def during(self, doing: str, times: int = 1) -> Iterator[None]:
        """The environment's own code runs, perhaps several times: what it raises, and how long it takes, is about it."""
        patience = self.options.timeout * times
        if doing != self.doing or time.monotonic() - self.sent > 0.5:
            self.line.send(("doing", (doing, patience)))
            self.sent, self.doing = time.monotonic(), doing
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
                self.findings.note("name", entry.note)
            if issubclass(cls, Host):
                made = replace(made, workers=0, timeout=self.options.timeout)
                self.raw(cls, made)
            self.world(cls, made)
        except BrokenError as e:
            self.findings.problem(e.about, str(e))
        except UserError as e:
            if e.__cause__ is None and not self.made:  # what was asked for is wrong
                raise
            self.findings.problem("refused", str(e))
        except Exception as e:
            if not self.made or isinstance(e, BrokenPipeError):
                raise
            self.findings.problem("form", f"what it returned could not be read: {in_words(e)}.")

    def raw(self, cls: Any, config: Any) -> None:
        """Step what the library or the user wrote. It ends the check where there is no use in going on."""
        refused: UserError | BrokenError | None = None
        try:
            with self.during("making it"):
                row = cls.row(config)
            self.line.send(("spec", row.spec))
            env = getattr(row, "env", None)
        except (UserError, BrokenError) as e:
            refused, env = e, stranded(e)
        if env is not None:
            self.made = True
            check = RawCheck(env, self.findings, self.during)
            check.play(self.options.steps, PATIENCE)
            check.check_pictures()
            if refused is None and "seeding" not in self.findings.found:
                with self.during("making another"):
                    other = cls.row(config)
                check.check_fresh_row(row, other, PATIENCE / 4)
                check.check_with_library(getattr(other, "env", None))
                other.close()
            self.confirm(GOOD_RAW, check.unchecked)
        if refused is not None:  # and nothing was found that explains it, or it would not have come so far
            raise refused
        row.close()

    def world(self, cls: Any, config: Any) -> None:
        """Hold the world that Shoal makes of it against the contract."""
        rows = self.options.rows
        with self.during("making the world", rows + 1):
            env = cls(config, rows=rows)
        env.checks_finite = False  # numbers that are not finite are found here
        self.made = True
        self.line.send(("spec", env.spec))
        seen = Statistics(env)
        contract = Contract(env, self.findings, self.during, seen.add)
        contract.play(self.options.steps, seconds=PATIENCE)
        self.line.send(("groups", seen.groups()))
        self.line.send(("seen", seen.episodes()))
        seen.judge(self.findings)
        with self.during("making another world", rows + 1):
            other = cls(config, rows=rows)
        other.checks_finite = False
        contract.replay(other)
        other.close()
        for sentence in env.news:
            self.findings.note(f"news {len(self.findings.found)}", sentence)
        env.close()
        self.confirm(GOOD_WORLD, contract.unchecked)
        self.line.send(("seen", {**seen.episodes(), "rates": self.speed(cls, config)}))

    def speed(self, cls: Any, config: Any) -> dict[str, float]:
        """Steps a second, for each way of stepping it."""
        ways = {"in one process": config}
        if issubclass(cls, Host):
            ways["with workers"] = replace(config, workers="auto")
        rates = {}
        for how, c in ways.items():
            with self.during(f"stepping {how}", 10 * self.options.rows):
                env = cls(c, rows=self.options.rows)
                collector = make_collector(env, random_players(env.spec), generator(0, "speed"))
                collector.collect(1)
                steps, began = 0, time.perf_counter()
                while (passed := time.perf_counter() - began) < SPEED:
                    collector.collect(5)
                    steps += 5 * env.rows
                rates[how] = steps / passed
                env.close()
        return rates


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


class Statistics:
    """What was seen of an environment while it was played at random: ranges, episodes, how they ended."""

    def __init__(self, env: Environment):
        self.spec, self.rows = env.spec, env.rows
        self.low: dict[Any, Tensor] = {}  # (group, part of the observation; none: reward) -> the least over steps and rows
        self.high: dict[Any, Tensor] = {}
        self.dtypes: dict[str, dict[str, str]] = {g.name: {} for g in env.spec.groups}
        self.lengths, self.ended = torch.zeros(env.rows, dtype=torch.long), []  # type: Tensor, list[int]
        self.count = {"steps": 0, "episodes": 0, "terminated": 0, "truncated": 0, "deaths": 0, "arrivals": 0}

    def add(self, before: Frame, out: Outcome) -> None:
        """A step."""
        going = ~out.over
        truncated = torch.zeros_like(out.over)  # somebody was there to the end and had not terminated
        for g in self.spec.groups:
            was, now, result = before[g.name], out.next[g.name], out.results[g.name]
            for frame in (before, out.next, out.frame):
                obs = frame[g.name].obs
                for name, _ in parts(g):
                    x = obs[name] if isinstance(obs, dict) else obs
                    self._widen((g.name, name), x)
                    self.dtypes[g.name][name] = str(x.dtype).removeprefix("torch.")
            self._widen((g.name, None), result.reward)
            truncated |= (was.alive & ~result.terminated).any(-1)
            self.count["deaths"] += int((was.alive & ~now.alive)[going].sum())
            self.count["arrivals"] += int((now.alive & ~was.alive)[going].sum())
        self.lengths += 1
        self.count["steps"] += 1
        self.count["episodes"] += int(out.over.sum())
        self.count["truncated"] += int((out.over & truncated).sum())
        self.count["terminated"] += int((out.over & ~truncated).sum())
        self.ended += self.lengths[out.over].tolist()
        self.lengths[out.over] = 0

    def _widen(self, key: Any, x: Tensor) -> None:
        low, high = x.amin(0), x.amax(0)  # over the rows
        self.low[key] = torch.minimum(self.low.get(key, low), low)
        self.high[key] = torch.maximum(self.high.get(key, high), high)

    def _range(self, *key: str | None) -> tuple[float | None, float | None]:
        return _number(self.low[key].min()), _number(self.high[key].max())

    def groups(self) -> dict[str, dict[str, Any]]:
        return {
            g.name: {
                "dtypes": self.dtypes[g.name],
                "range": {name: self._range(g.name, name) for name, _ in parts(g)},
                "reward_range": self._range(g.name, None),
            }
            for g in self.spec.groups
        }

    def episodes(self) -> dict[str, Any]:
        lengths = {"shortest": min(self.ended, default=None), "longest": max(self.ended, default=None)}
        return {**self.count, **lengths, "rows": self.rows}

    def judge(self, findings: Findings) -> None:
        """Constants, and episodes that do not end."""
        for g in self.spec.groups:
            still = [self.low[g.name, n] == self.high[g.name, n] for n, _ in parts(g)]
            count, total = sum(int(x.sum()) for x in still), sum(x.numel() for x in still)
            if count:
                text = "nothing" if count == total else f"{total - count} of {total} numbers"
                what = "all are constant" if count == total else "the others are constant"
                findings.note("constant", f"in what {g.name!r} sees, {text} ever changed: {what}.")
            low, high = self._range(g.name, None)
            if low is not None and low == high:
                findings.note("pay", f"{g.name!r} was always paid {low:g}: at random it never earned anything else.")
        steps, horizon = self.count["steps"], self.spec.horizon
        if self.count["episodes"]:
            return
        if horizon and horizon > steps:
            findings.note("ends", f"no episode ended in {steps} steps, and one may have {horizon}: look on with --steps.")
        else:
            text = f"no episode ended in {steps} steps: it never truncates"
            advice = "give it a limit of time (or look on with --steps), for evaluations wait for ends"
            findings.problem("ends", f"{text}; {advice}.")


def _number(x: Tensor) -> float | None:
    """None where it is not finite, which JSON has no word for."""
    return float(x) if x.isfinite() else None


def why_not(cls: Any, spec: EnvSpec) -> str:
    spec = replace(spec, common=True)  # who needs common pay learns from the team's mean
    try:
        fits(cls, spec, [g.name for g in spec.groups])
    except UserError as e:
        return str(e)
    return ""
