"""A run's settings: from flags, from Python or from config.json, checked against the world before anything starts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from shoal import files
from shoal.envs.regroup import behind, regrouped
from shoal.flags import Flag, build, flags_of, parse_span, refuse_huge
from shoal.ids import Entry, find, near
from shoal.log.logger import LogConfig
from shoal.nets.config import NetConfig
from shoal.spec import EnvSpec, UserError
from shoal.training.checkpoint import SaveConfig
from shoal.training.evaluate import EvalConfig

MOST_THREADS = 256
MOST_SEEDS = 1000


@dataclass(frozen=True)
class RunConfig:
    steps: int = 1_000_000  # environment steps in all: one step of one row each
    until: int | None = None  # save and stop after so many steps, as an interruption would; schedules still end at `steps`
    time: str | None = None  # stop after so long: 90s, 5m, 2h
    stop_score: float | None = None  # stop when an evaluation's score (see --save.best) is at least this
    envs: int = 64  # rows: copies of the world stepped together
    seed: int = 0  # everything random follows from it
    seeds: int = 1  # so many runs at once, of this seed and those after it: on CUDA in one process, else in one a core
    device: str = "auto"  # auto, cpu, cuda or cuda:1; auto: cuda where there is one
    threads: int | None = None  # CPU threads; none: one, and all cores for what is fused and large
    compile: Literal["auto", "off", "graph", "fused"] = (
        "auto"  # graph: captured, recorded; fused: our kernels too; auto: the most
    )
    matmul: Literal["tf32", "float32"] = "tf32"  # precision of the nets' matrix products on CUDA
    reward: Literal["auto", "own", "team-mean", "team-sum"] = (
        "auto"  # what learners are paid; auto: own, but team-mean where one needs common pay; a mean counts the dead as well
    )
    regroup: str = ""  # who is in which group: fast=agent_0 slow=agent_1,agent_2; empty: by names and spaces
    out: str | None = None  # the run's folder; default runs/<env>/<algo>/<name>
    init: str | None = None  # start from the weights of this run or checkpoint
    render: bool = False  # leave a clip of each evaluation in media/
    quiet: bool = False  # print nothing

    def __post_init__(self) -> None:
        for name in ("steps", "envs", "seeds"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}: it must be at least 1.")
        refuse_huge(self.envs, "--envs")
        if self.seeds > MOST_SEEDS:
            raise UserError(f"--seeds is {self.seeds}: it takes a number from 1 to {MOST_SEEDS}.")
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise UserError(f"--threads is {self.threads}: it takes a number from 1 to {MOST_THREADS}.")
        if self.stop_score is not None and math.isnan(self.stop_score):
            raise UserError("--stop-score is nan: it takes a number.")
        if self.until is not None and self.until < 1:
            raise UserError(f"--until is {self.until}: it must be at least 1.")
        parse_span(self.time, "--time")


SECTIONS: dict[str, Any] = {"eval": EvalConfig, "save": SaveConfig, "log": LogConfig}
PER_GROUP = ("algo", "net")
DEEPEST = 20  # brackets in brackets of a config.json


@dataclass(frozen=True)
class Settings:
    """Everything that was asked for, in plain values: what config.json holds."""

    algo: str
    env: str
    run: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)  # algo, net, env, eval, save, log
    groups: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # group -> algo or net -> field -> value
    team: dict[str, str] = field(default_factory=dict)  # group or team -> algorithm, run or random
    players: dict[str, dict[str, Any]] = field(default_factory=dict)  # group -> who came to play it; a run's record
    world: dict[str, Any] = field(default_factory=dict)  # its spec, and how its own loop speaks; a run's record

    def section(self, name: str) -> dict[str, Any]:
        return self.sections.get(name, {})

    def completed(self, players: dict[str, dict[str, Any]], world: dict[str, Any]) -> Settings:
        """As a run records it: defaults filled in (an algorithm's with its player), so that it starts again as it was."""
        entry = find("envs", self.env)
        kinds = {"env": entry.load().Config, **SECTIONS}
        own = {"env": entry.settings}
        full = {k: dataclasses.asdict(build(cls, {**own.get(k, {}), **self.section(k)}, k)) for k, cls in kinds.items()}
        run = dataclasses.asdict(build(RunConfig, self.run, "run"))
        run["init"] = absolute(run["init"]) if run["init"] else None
        team = {g: absolute(who) for g, who in self.team.items()}
        sections, groups, players = map_own(({**self.sections, **full}, self.groups, players), absolute)
        env = map_own(absolute(self.env), absolute)
        return Settings(absolute(self.algo), env, run, sections, groups, team, players, world)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(path: Path) -> Settings:
        try:
            values = json.loads(files.read_text(path))
        except UserError:
            raise
        except OSError:
            raise UserError(f"there is no file {path}.") from None
        except (ValueError, RecursionError) as e:  # no JSON, no text, a number of thousands of digits, brackets in brackets
            raise UserError(f"{path} is not JSON that can be read: {e}.") from None
        if not isinstance(values, dict) or not {"algo", "env"} <= set(values) or not _shallow(values, DEEPEST):
            raise UserError(f"{path} is no config of Shoal's: it needs at least `algo` and `env`.")
        known = [f.name for f in dataclasses.fields(Settings)]
        for key, value in values.items():
            if key not in known:
                raise UserError(f"{path} has an unknown key {key!r}{near(key, known)}.")
            depth = {"algo": 0, "env": 0, "run": 1, "team": 1, "sections": 2, "players": 2, "groups": 3, "world": 1}[key]
            if not _nested(value, depth) or (depth == 0 and not isinstance(value, str)):
                raise UserError(f"{path}: {key!r} is {value!r:.60}, which is not of the form that a run's config.json has.")
        return Settings(**values)


def absolute(word: str) -> str:
    """A path to a user's file or run as it is from anywhere; an id as it is."""
    path = Path(word)
    return str(path.resolve()) if word.endswith((".py", ".pt")) or os.path.isfile(path / "config.json") else word


def map_own(tree: Any, f: Callable[[str], str]) -> Any:
    """Settings in which every user's own object that is named as file.py:Name, perhaps with arguments behind it, has its file
    replaced by f(file)."""
    if isinstance(tree, dict):
        return {k: map_own(v, f) for k, v in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_own(v, f) for v in tree)
    match = re.fullmatch(r"(.+?\.py)(:\w+(?::.*)?)", tree, re.DOTALL) if isinstance(tree, str) else None
    return f"{f(match[1])}{match[2]}" if match else tree


def _shallow(value: Any, depth: int) -> bool:
    """Whether no more than so many brackets are in one another."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_shallow(v, depth - 1) for v in inside)


def _nested(value: Any, depth: int) -> bool:
    return depth == 0 or (isinstance(value, dict) and all(_nested(v, depth - 1) for v in value.values()))


@dataclass(frozen=True)
class Resolved:
    """Settings as the objects they stand for."""

    settings: Settings
    run: RunConfig
    env_entry: Entry
    env_config: Any
    eval: EvalConfig
    save: SaveConfig
    log: LogConfig
    device: torch.device

    def decided(self, **run: Any) -> Resolved:
        """What `auto` in settings of the run means here: it is written down, and kept."""
        settings = dataclasses.replace(self.settings, run={**self.settings.run, **run})
        return dataclasses.replace(self, settings=settings, run=dataclasses.replace(self.run, **run))

    def make_env(self, rows: int, device: torch.device | None = None, regroup: str | None = None) -> Any:
        """`regroup`: with other groups than the run has."""
        how = {"rows": rows, "device": device or self.device}
        env = grouped(self.env_entry.load(), self.env_config, self.run.regroup, **how)
        return behind(env, regroup) if regroup else env


def make_env(
    id: str, rows: int, device: torch.device, dtype: torch.dtype = torch.float32, regroup: str = "", **config: Any
) -> Any:
    """An environment by id or path."""
    entry = find("envs", id)
    cls = entry.load()
    settings = build(cls.Config, {**entry.settings, **config}, "env")
    return grouped(cls, settings, regroup, rows=rows, device=device, dtype=dtype)


def grouped(cls: Any, config: Any, regroup: str, **how: Any) -> Any:
    """An environment of this class, with its groups as --regroup says."""
    return regrouped(cls, config, regroup, **how) if regroup else cls(config, **how)


def resolve(settings: Settings, device: str | None = None) -> Resolved:
    """`device` stands in for the one in the settings: a run of one machine may be played on another."""
    run = build(RunConfig, settings.run, "run")
    env_entry = find("envs", settings.env)
    env_cls = env_entry.load()
    for name in settings.sections:
        if name not in (*PER_GROUP, "env", *SECTIONS):
            raise UserError(f"there is no section {name!r}{near(name, (*PER_GROUP, 'env', *SECTIONS))}.")
    made = {name: build(cls, settings.section(name), name) for name, cls in SECTIONS.items()}
    env_config = build(env_cls.Config, {**env_entry.settings, **settings.section("env")}, "env")
    place = choose_device(device or run.device)
    resolved = Resolved(settings, run, env_entry, env_config, **made, device=place)
    return resolved.decided(compile=most_compiled(place)) if run.compile == "auto" else resolved


def most_compiled(device: torch.device) -> Literal["graph", "fused"]:
    """The furthest that a machine can go without a word: kernels of our own need a compiler, and on CUDA Triton."""
    if device.type == "cpu":
        from shoal.kernels.compiler import CannotFuse, compiler

        try:
            compiler()
        except CannotFuse:
            return "graph"
        return "fused"
    from shoal.kernels.triton import why_not

    return "graph" if why_not() else "fused"


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device is {name!r}: it takes auto, cpu, cuda or cuda:1.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device is {name!r}: it takes auto, cpu, cuda or cuda:1.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device is {name!r} and this machine has no CUDA device that PyTorch can use: take cpu or auto.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device is {name!r} and there are only {torch.cuda.device_count()} CUDA devices.")
    return device


def seats(settings: Settings, spec: EnvSpec) -> dict[str, str]:
    """Group -> who is asked to play it: an algorithm's id or a run's folder."""
    names = [g.name for g in spec.groups]
    have = list(dict.fromkeys([*names, *spec.teams]))
    for key, who in settings.team.items():
        if key not in have:
            raise UserError(f"there is no group or team {key!r} here{near(key, have)}: it has {', '.join(have)}.")
        if not isinstance(who, str):
            raise UserError(f"--team.{key} is {who!r}: it takes an algorithm, a run's folder or random.")
    by_team = {g.name: settings.team[g.team] for g in spec.groups if g.team in settings.team}
    by_group = {g: who for g, who in settings.team.items() if g in names}
    return {g: {**by_team, **by_group}.get(g, settings.algo) for g in names}


def group_config(settings: Settings, entry: Entry, group: str) -> tuple[Any, NetConfig]:
    """An algorithm's config and its nets' for one group: defaults, then the name's settings, then what a run recorded of the
    same algorithm, then what was asked for all groups, then for this one."""
    cls = entry.load().Config
    own, recorded = settings.groups.get(group, {}), settings.players.get(group, {})
    recorded = recorded if recorded.get("id") in (entry.id, str(entry.path)) else {}
    everyone = settings.section("algo")
    if entry != find(
        "algos", settings.algo
    ):  # another algorithm plays this group: it takes what it knows of the common settings
        everyone = {k: v for k, v in everyone.items() if k in {f.name for f in dataclasses.fields(cls)}}
    known = {**entry.settings, **recorded.get("algo", {})}
    config = build(cls, {**known, **everyone, **own.get("algo", {})}, f"algo ({group})")
    nets = {**entry.load().net_defaults, **recorded.get("net", {}), **settings.section("net"), **own.get("net", {})}
    return config, build(NetConfig, nets, f"net ({group})")


# --- from flags ------------------------------------------------------------------------------------------------------


def all_flags(algo: Entry, env: Entry) -> dict[str, dict[str, Flag]]:
    """Section -> flags, as `shoal train ALGO ENV --help` shows them; the name's own settings are the defaults."""

    def with_defaults(flags: dict[str, Flag], own: dict[str, Any]) -> dict[str, Flag]:
        own = {k.replace("_", "-"): v for k, v in own.items()}
        return {n: dataclasses.replace(f, default=own.get(n.partition(".")[2], f.default)) for n, f in flags.items()}

    common, learner, world = common_flags(), algo.load(), env.load()
    return {
        "run": common.pop("run"),
        "algo": with_defaults(flags_of(learner.Config, "algo."), algo.settings),
        "net": with_defaults(common.pop("net"), learner.net_defaults),
        "env": with_defaults(flags_of(world.Config, "env."), env.settings),
        **common,
    }


def common_flags() -> dict[str, dict[str, Flag]]:
    """Those of every algorithm and environment."""
    kinds = {"net": NetConfig, **SECTIONS}
    return {"run": flags_of(RunConfig), **{name: flags_of(cls, f"{name}.") for name, cls in kinds.items()}}


def from_flags(algo: str, env: str, given: dict[str, str | None], base: Settings | None = None) -> Settings:
    """Settings from what was typed; none where a flag has no word. `base` (a config.json) is overlaid."""
    flags = all_flags(find("algos", algo), find("envs", env))
    known = {name: (section, flag) for section, fs in flags.items() for name, flag in fs.items()}
    run = {k: v for k, v in base.run.items() if k not in ("out", "until")} if base else {}  # those were that call's own
    sections = {k: dict(v) for k, v in base.sections.items()} if base else {}
    groups = {g: {k: dict(v) for k, v in s.items()} for g, s in base.groups.items()} if base else {}
    team = dict(base.team) if base else {}
    players = base.players if base else {}
    if base and base.algo != algo:  # another algorithm: what was set for the first is not its own
        sections.pop("algo", None)
        groups = {g: {k: v for k, v in s.items() if k != "algo"} for g, s in groups.items()}
    for name, text in given.items():
        head, _, rest = name.partition(".")
        group, dot, key = rest.partition(".")
        if head == "team" and rest:
            team[rest.replace("-", "_")] = Flag(name, str, "", "").parse(text)
        elif name in known:
            section, flag = known[name]
            target = run if section == "run" else sections.setdefault(section, {})
            target[name.partition(".")[2].replace("-", "_") if section != "run" else name.replace("-", "_")] = flag.parse(text)
        elif head in PER_GROUP and dot:
            if text is None and f"{head}.{key}" in known:
                dataclasses.replace(known[f"{head}.{key}"][1], name=name).parse(text)  # what is no switch needs a value
            word = "true" if text is None else text  # its type is known to who plays the group
            groups.setdefault(group.replace("-", "_"), {}).setdefault(head, {})[key.replace("-", "_")] = word
        elif name == "env.groups":
            raise UserError("--env.groups is --regroup now, of any environment: --regroup fast=agent_0 slow=agent_1,agent_2.")
        else:
            raise UserError(f"there is no flag --{name}{near(name, known)}; `shoal train {algo} {env} --help` lists them.")
    return Settings(algo, env, run, sections, groups, team, players)


def check_groups(settings: Settings, spec: EnvSpec) -> None:
    names = [g.name for g in spec.groups]
    for g in settings.groups:
        if g not in names:
            raise UserError(f"there is no group {g!r} here{near(g, names)}: it has {', '.join(names)}.")
        for section in settings.groups[g]:
            if section not in PER_GROUP:
                raise UserError(
                    f"a group has no section {section!r}{near(section, PER_GROUP)}: it has {' and '.join(PER_GROUP)}."
                )
