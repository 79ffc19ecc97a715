"""A run is a folder: everything a run was and did, and the only thing that tools read."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

import shoal
from shoal import files
from shoal.envs.base import Environment
from shoal.envs.conversions import Conversion
from shoal.ids import slug
from shoal.log.logger import read_metrics, read_remarks
from shoal.spec import EnvSpec, UserError, spec_data, spec_of
from shoal.training import checkpoint, trust
from shoal.training.settings import Resolved, Settings, absolute, map_own, resolve

OWN_FILES = ("config.json", "metrics.jsonl", "metrics.csv", "train.log", "signature", ".lock")
HALVES = (*(f"{name}*.part" for name in OWN_FILES), "checkpoints/*.part", "checkpoints/nets/*/*.part", "media/step-*.part")
LEFT = "left"  # the folder of checkpoints that came after the one from which a run goes on
WORLDS = ["gymnasium", "pettingzoo", "Box2D", "gfootball", "mpe2", "lbforaging", "rware", "vmas", "envpool"]


class Run:
    """A run's folder. `Run(path)` opens one that exists, and runs nothing; `resolve` runs its code, where that is trusted."""

    def __init__(self, path: str | Path):
        self.path = named(path)
        if not os.path.isfile(self.path / "config.json"):  # which is false, and no error, of names that no system takes
            raise UserError(f"{str(path)!r} is no run: there is no config.json in it; `shoal runs` lists those under runs/.")
        self.recorded = Settings.from_json(self.path / "config.json")  # as they were asked for: a user's files where they lay
        for group, player in self.recorded.players.items():
            if not _is_player(group, player, self.recorded.players):
                raise UserError(f"{self.path / 'config.json'} does not say who played {group!r} in the form that a run's has.")
        self.settings = self._with_own_code(self.recorded)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    @property
    def remarks(self) -> list[str]:
        """What it said of itself that is worth a look: that it ended far below its best, that values ran away."""
        return [line["sentence"] for line in read_remarks(self.path)]

    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line["kind"] == "eval"]

    def resolve(self, device: str | None = None) -> Resolved:
        trust.require(self.path)
        return resolve(self.settings, device)

    @cached_property
    def spec(self) -> EnvSpec:
        return self._world[0]

    @cached_property
    def conversions(self) -> dict[str, Conversion]:
        """How the loop of the environment's own library speaks, by agent."""
        return self._world[1]

    @cached_property
    def _world(self) -> tuple[EnvSpec, dict[str, Conversion]]:
        """As the run recorded it: no environment is made. An older run has no record, and one is."""
        world = self.settings.world
        if not world:
            env = self.resolve("cpu").make_env(1)
            return env.spec, env.conversions
        try:
            spec, conversions = spec_of(world["spec"]), {a: Conversion(**c) for a, c in world["conversions"].items()}
            for g in spec.groups:
                for a in g.agents:  # made once, to see that they can be
                    conversions[a].observer(g), conversions[a].moves()
            return spec, conversions
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            raise UserError(
                f"{self.path / 'config.json'} has a `world` that cannot be read: {type(e).__name__}: {e}."
            ) from None

    def _with_own_code(self, settings: Settings) -> Settings:
        """A user's own files as they were when the run began: it keeps copies."""

        def own(kind: str, id: str) -> str:
            copy = self.path / "code" / kind / code_name(id)
            return str(copy) if id.endswith(".py") and copy.exists() else id

        players = {g: {**p, "id": own("algos", p["id"])} for g, p in settings.players.items()}
        team = {g: own("algos", who) for g, who in settings.team.items()}
        parts = map_own((settings.sections, settings.groups, players), partial(own, "objects"))
        sections, groups, players = parts
        algo, env = own("algos", settings.algo), own("envs", settings.env)
        return Settings(algo, env, settings.run, sections, groups, team, players, settings.world)

    def set_steps(self, steps: int) -> None:
        """A new total, for those who go on after us."""
        settings = Settings.from_json(self.path / "config.json")
        changed = dataclasses.replace(settings, run={**settings.run, "steps": steps})
        files.write_text(self.path / "config.json", changed.to_json())

    def load(self, which: str = "last") -> dict[str, Any]:
        return checkpoint.read(self.find(which))

    def write_checkpoint(self, name: str, state: dict[str, Any], nets: dict[str, dict[str, Any]]) -> None:
        """A checkpoint; and nets in files of their own, `nets/<checkpoint>/<file>.pt` (`netfiles.py`)."""
        self.refuse_links()
        for file, net in nets.items():
            (self.checkpoints / "nets").mkdir(exist_ok=True)
            checkpoint.write(self.checkpoints / "nets" / name / f"{file}.pt", net)
        checkpoint.write(self.checkpoints / f"{name}.pt", state)

    def find(self, which: str) -> Path:
        """The file of a checkpoint: last, best, a step's number, or a file by its path."""
        name = f"step-{int(which):012d}" if which.isdecimal() and len(which) < 19 else which
        path = Path(which) if which.endswith(".pt") else self.checkpoints / f"{name}.pt"
        if os.path.exists(path):
            return path
        raise UserError(f"the run {self.path} has no checkpoint {which!r}; it has {self._have}.")

    @property
    def _have(self) -> str:
        return ", ".join(sorted(p.stem for p in self.checkpoints.glob("*.pt"))) or "none"

    def refuse_lost(self) -> None:
        """Refuse a run that lost its last checkpoint. One that was killed before it had any, at step 0, has lost nothing."""
        found = [p for pattern in ("*.pt", "replay/*.pt", f"{LEFT}/**/*.pt") for p in self.checkpoints.glob(pattern)]
        path, lines = self.path / "metrics.jsonl", self.metrics
        whole = files.read_text(path, "replace").count("\n") if path.exists() else 0
        begun = whole > len(lines) or any(line["step"] for line in lines)
        if not begun and (not found or ([p.name for p in found] == ["best.pt"] and not checkpoint.read(found[0])["step"])):
            return
        other = "" if self._have == "none" else f" with `shoal resume {shlex.quote(str(self.path))} --from best|STEP|FILE`"
        raise UserError(
            f"the run {self.path} has been trained, and its checkpoints/last.pt is missing: go on from another checkpoint"
            f"{other}; it has {self._have}."
        )

    def set_aside(self, step: int) -> list[Path]:
        """Move the last checkpoint, and what else is of after this step, into a new folder, checkpoints/left/1 or the next:
        for a run that goes on from there. Without a last checkpoint nobody takes it for one that can simply be resumed."""
        later = [p for p in sorted(self.checkpoints.glob("*.pt")) if p.name == "last.pt" or _step_of(p) > step]
        if not later:
            return []
        taken = [int(p.name) for p in (self.checkpoints / LEFT).glob("*") if p.name.isdecimal()]
        folder = self.checkpoints / LEFT / str(max(taken, default=0) + 1)
        folder.mkdir(parents=True)
        for path in later:
            path.rename(folder / path.name)
            shutil.rmtree(self.checkpoints / "nets" / path.stem, ignore_errors=True)
        return [folder / p.name for p in later]

    def refuse_links(self) -> None:
        """Before anything is written or deleted: it would be elsewhere. W&B has links of its own, and looks after them."""
        if not self.path.is_dir():
            raise FileNotFoundError(f"its folder {self.path} is gone")
        files.refuse_links(self.path, leave=("wandb",))
        for path in (self.path / name for name in OWN_FILES):
            if what := files.odd_kind(path):
                raise UserError(f"{path} is {what}, and a file is written there: move it away.")

    def lock(self) -> TextIO:
        """Held while a process writes to the run; a second one is refused. What a killed one left half written is removed."""
        self.refuse_links()
        f = (self.path / ".lock").open("w")
        if not _lock(f):
            raise UserError(f"the run {self.path} is being written by another process: wait for it, or stop it first.")
        for path in (p for pattern in HALVES for p in self.path.glob(pattern)):
            path.unlink(missing_ok=True)
        return f

    def is_locked(self) -> bool:
        """Whether a process writes to the run now."""
        if not (self.path / ".lock").exists():
            return False
        try:
            with files.reading(self.path / ".lock") as f:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # it may not be read
            return False
        return False

    @staticmethod
    def create(resolved: Resolved, players: dict[str, dict[str, Any]], world: Environment) -> Run:
        """A new folder with its config.json and versions.json. Nothing is made when it cannot be made whole."""
        settings, run = resolved.settings, resolved.run
        record = settings.completed(players, recorded_world(world))
        default = Path("runs") / slug(settings.env) / slug(settings.algo)
        folder = _fresh(default, run.seed) if run.out is None else named(run.out)
        refuse_taken(folder)
        trust.require_key(record)
        try:
            for sub in ("checkpoints", "media"):
                (folder / sub).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"the run folder {folder} cannot be made: {e.strerror}; choose another --out.") from None
        if not os.access(folder, os.W_OK):
            raise UserError(f"the run folder {folder} cannot be written; choose another --out.")
        objects: dict[str, None] = {}
        map_own((record.sections, record.groups, players), lambda file: objects.setdefault(file) or file)
        for kind, ids in (("algos", {p["id"] for p in players.values()}), ("envs", {settings.env}), ("objects", objects)):
            for id in (absolute(i) for i in ids if i.endswith(".py")):
                (folder / "code" / kind / code_name(id)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(id, folder / "code" / kind / code_name(id))
        files.write_text(folder / "versions.json", json.dumps(versions(resolved), indent=2) + "\n")
        files.write_text(folder / "config.json", record.to_json())  # last: with it the folder is a run
        trust.sign(folder, made=True)
        return Run(folder)


def _lock(f: TextIO) -> bool:
    for _ in range(3):
        with suppress(OSError):
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)  # perhaps somebody asked whether it is locked, and held it for a moment
    return False


def named(path: str | Path) -> Path:
    """A run's folder as it was named. Nothing at all would mean the folder one is in."""
    if isinstance(path, str) and not path.strip():
        raise UserError("the name of the run is empty: give its folder; `shoal runs` lists those under runs/.")
    return Path(path)


def _is_player(group: str, player: dict[str, Any], groups: dict[str, Any]) -> bool:
    """Whether it is what `players.record` writes of one; older runs have less."""
    bound = player.get("bound", [])
    return (
        isinstance(player.get("id"), str)
        and isinstance(player.get("learns"), bool)
        and isinstance(bound, list)
        and all(isinstance(g, str) and g in groups for g in bound)
        and ("bound" not in player or group in bound)
        and all(isinstance(player.get(k, {}), dict) for k in ("algo", "net"))
        and isinstance(player.get("common", False), bool)
    )


def _step_of(path: Path) -> float:
    """A checkpoint's step, by its name or else by what is in it; one that cannot be read may be of any."""
    digits = path.stem.removeprefix("step-")
    if digits.isdecimal():
        return int(digits)
    try:
        return checkpoint.read(path)["step"]
    except UserError:
        return math.inf


def recorded_world(env: Environment) -> dict[str, Any]:
    return {"spec": spec_data(env.spec), "conversions": {a: dataclasses.asdict(c) for a, c in env.conversions.items()}}


def refuse_taken(folder: Path) -> None:
    """A folder that holds something is left alone."""
    if os.path.exists(folder / "config.json"):
        raise UserError(
            f"the run {folder} exists: go on with `shoal resume {shlex.quote(str(folder))}`, or choose another --out."
        )
    if os.path.exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is no run: choose another --out.")


def code_name(id: str) -> str:
    """The name of a run's copy of a user's file, by its absolute path then: two files of one name stay apart."""
    return f"{hashlib.sha1(id.encode()).hexdigest()[:8]}/{Path(id).name}"


def _fresh(parent: Path, seed: int) -> Path:
    name = f"{datetime.now():%Y%m%d-%H%M%S}-seed{seed}"
    folder, k = parent / name, 1
    while folder.exists():
        k += 1
        folder = parent / f"{name}-{k}"
    return folder


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # it was installed under another name, or is a folder
        return getattr(sys.modules[name], "__version__", None)


def versions(resolved: Resolved) -> dict[str, Any]:
    root = Path(__file__).parents[3]  # of a checkout; elsewhere there is no .git of ours
    git = shutil.which("git") if (root / ".git").exists() else None
    done = subprocess.run([git, "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True) if git else None
    commit = done.stdout.strip() or None if done else None
    device = torch.cuda.get_device_name(resolved.device) if resolved.device.type == "cuda" else platform.machine()
    return {
        "shoal": shoal.__version__,
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **{name: _version(name) for name in WORLDS if name in sys.modules},
        "device": f"{resolved.device}: {device}",
        "platform": platform.platform(),
        "date": datetime.now().isoformat(" ", "seconds"),
    }
