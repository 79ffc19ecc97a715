"""A doctor for environments: steps one with random legal actions, and says what it is, what was seen and what is wrong.

It checks twice. First the raw object, where there is one (of Gymnasium's or PettingZoo's kind): what `reset` and `step`
return, against the spaces it declares (`raw.py`), and what the library's own checker says. Then the world that Shoal makes of
it, or a native one: the contract of `envs/base.py` (`contract.py`).
A finding is `ok`, a `note` (it works; know it) or a `problem` (training on it goes wrong), and one sentence.

All this happens in a process of its own (`doctor.py`), which tells what it finds as it goes: an environment that hangs is
interrupted where it hangs, or killed; one that crashes takes nobody with it. What it prints on stdout is dropped.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shoal.envs.rows import parts
from shoal.ids import catalog
from shoal.log.console import short
from shoal.spec import Box, EnvSpec, Group, UserError
from shoal.tools.contract import Finding, Level
from shoal.tools.doctor import GRACE, CheckOptions, run_check, why_not


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
        return {} if self.spec is None else {e.id: why_not(e.load(), self.spec) for e in catalog("algos").values()}

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
    child = context.Process(target=run_check, args=(theirs, env, dict(config or {}), options), name="shoal-check")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child uses one alone
        child.start()
    theirs.close()
    doing, patience, last = "loading it", options.timeout, time.monotonic()
    try:
        while True:
            if line.poll(0.1):
                with suppress(EOFError):
                    last, (word, what) = time.monotonic(), line.recv()
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
            if time.monotonic() - last > patience + GRACE:
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
