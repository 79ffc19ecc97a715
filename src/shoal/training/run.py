"""A run is a folder: everything a run was and did, and the only thing that tools read."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import datetime
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

import shoal
from shoal.envs.base import Environment
from shoal.envs.conversions import Conversion
from shoal.log.logger import read_metrics
from shoal.spec import EnvSpec, UserError, spec_data, spec_of
from shoal.training import checkpoint
from shoal.training.settings import Resolved, Settings, absolute, map_own, resolve

WORLDS = ["gymnasium", "pettingzoo", "Box2D", "gfootball", "mpe2", "lbforaging", "rware", "vmas", "envpool"]


class Run:
    """A run's folder. `Run(path)` opens one that exists."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not os.path.isfile(self.path / "config.json"):  # which is false, and no error, of names that no system takes
            raise UserError(f"{str(path)!r} is no run: there is no config.json in it; `shoal runs` lists those under runs/.")
        self.recorded = Settings.from_json(self.path / "config.json")  # as they were asked for: a user's files where they lay
        self.settings = self._with_own_code(self.recorded)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line["kind"] == "eval"]

    def resolve(self, device: str | None = None) -> Resolved:
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
            return spec_of(world["spec"]), {a: Conversion(**c) for a, c in world["conversions"].items()}
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
        aside = self.path / "config.json.part"
        aside.write_text(dataclasses.replace(settings, run={**settings.run, "steps": steps}).to_json())
        aside.replace(self.path / "config.json")

    def load(self, which: str = "last") -> dict[str, Any]:
        """A checkpoint by name: last, best or a step's number."""
        name = which if which in ("last", "best") else f"step-{int(which):012d}" if which.isdecimal() else which
        path = self.checkpoints / f"{name}.pt"
        if not os.path.exists(path):
            have = ", ".join(sorted(p.stem for p in self.checkpoints.glob("*.pt"))) or "none"
            raise UserError(f"the run {self.path} has no checkpoint {which!r}; it has {have}.")
        return checkpoint.read(path)

    def lock(self) -> TextIO:
        """Held while a process writes to the run; a second one is refused."""
        f = (self.path / ".lock").open("w")
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"the run {self.path} is being written by another process: wait for it, or stop it first."
            ) from None
        return f

    @staticmethod
    def create(resolved: Resolved, players: dict[str, dict[str, Any]], world: Environment) -> Run:
        """A new folder with its config.json and versions.json. Nothing is made when it cannot be made whole."""
        settings, run = resolved.settings, resolved.run
        record = settings.completed(players, recorded_world(world))
        folder = Path(run.out) if run.out else _fresh(Path("runs") / slug(settings.env) / slug(settings.algo), run.seed)
        refuse_taken(folder)
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
        (folder / "versions.json").write_text(json.dumps(versions(resolved), indent=2) + "\n")
        (folder / "config.json").write_text(record.to_json())  # last: with it the folder is a run
        return Run(folder)


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


def slug(id: str) -> str:
    """An id as a folder's name: of a user's own file its name alone."""
    place, _, name = id.rpartition(":")
    if place.endswith(".py"):
        return f"{Path(place).stem}-{name}"
    return Path(id).stem if id.endswith(".py") else id.replace("/", "-").replace(":", "-")


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
    }
