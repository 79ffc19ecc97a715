"""Rows of ordinary Python environments, stepped here one after another, or in worker processes over shared memory.

A worker holds several rows. What is asked of it and its answer are a byte each over a socket; actions, observations and rewards
lie in memory that all share (`rows.py` says what is where). Rows are in two halves, fixed by their numbers, and every
worker has some of both: whoever collects acts for one half while the other is being stepped. A row that is over begins
its next episode in the same trip, from a seed that came along with the actions, so that nothing depends on which worker was
faster, or how many there are.

A worker that dies, or takes longer than `timeout`, is replaced: its rows are truncated where they were last seen and begin new
episodes, a sentence in `news` says so, `restarts` counts it, and the run goes on. An exception of the environment's own
is no accident and stops the run with its words. So does a reward, an observation or a state that is not finite: nobody learns
from it, and the sentence says where it came from (what agents that are not alive see may be anything).

State is each row's seed and its actions since: `set_state` plays the episode again. Where that does not lead to the same
observation, the row begins a new episode, and `news` says so.
"""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
import socket
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shoal.envs.base import Environment
from shoal.envs.conversions import Conversion
from shoal.envs.drawing import Sketch
from shoal.envs.rows import Arrays, Maker, Row, Steps, in_words, parts
from shoal.envs.workers import Serial, WorkerPool, broken, cores
from shoal.ids import USER_MODULE, own_files
from shoal.spec import Frame, Group, NotFiniteError, Outcome, Result, UserError, View

BITS = 15  # of a seed, from each of two uniform numbers
LONGEST = 100_000  # steps of an episode that are kept, to play them again

Snapshot = dict[tuple[str, ...], np.ndarray]  # a frame of some rows: a place without its frame's name -> [rows, ...]


MOST_ROWS = 65_536


@dataclass(frozen=True)
class HostConfig:
    workers: Literal["auto"] | int = "auto"  # processes that step the rows; auto: one a core; 0: stepped in this one
    overlap: bool = True  # with workers: act for one half of the rows while the other is stepped
    timeout: float = 60.0  # seconds a worker may take before it is replaced
    start: Literal["auto", "fork", "spawn"] = "auto"  # how workers are started; auto: fork on Linux, else spawn

    def __post_init__(self) -> None:
        if self.workers != "auto" and not 0 <= self.workers <= 4096:
            raise UserError(f"--env.workers is {self.workers}: it takes a number of processes, 0 for none, or auto.")
        if self.workers not in ("auto", 0) and not hasattr(socket, "send_fds"):
            raise UserError("--env.workers needs what this system does not have: take 0.")
        if not self.timeout > 0:
            raise UserError(f"--env.timeout is {self.timeout}: it takes seconds, more than zero.")
        if self.start == "fork" and "fork" not in multiprocessing.get_all_start_methods():
            raise UserError("--env.start is fork, which this system does not have: take spawn.")


class Host(Environment, ABC):
    """A world of ordinary Python environments. An adapter has a Config and says how a row is made."""

    Config: Any = HostConfig
    noise = 2  # uniform numbers of which a row's next seed is made
    widest = 16  # rows of an evaluation
    checks_finite = True  # whether numbers that are not finite stop it; false where somebody else looks for them

    @classmethod
    @abstractmethod
    def row(cls, config: Any, drawn: bool = False) -> Row:
        """One environment, of which pictures may be asked where it is `drawn`."""

    def __init__(
        self, config: Any = None, rows: int = 1, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ):
        self.config: Any = config if config is not None else self.Config()
        if rows > MOST_ROWS:
            raise UserError(f"there are to be {rows:,} rows, each a Python object of its own: take {MOST_ROWS:,} at most.")
        self.rows, self.device = rows, torch.device(device)
        self._files = own_files(getattr(self.config, f.name) for f in fields(self.config))
        self._own = inspect.getfile(type(self)) if type(self).__module__.startswith(USER_MODULE) else None
        if self._own is not None:
            self._files[self._own] = Path(self._own).read_bytes()
        try:
            self._template = self.row(self.config)
            self._template.close()
        except SystemExit as e:
            raise broken(in_words(e)) from e
        self.spec, self.news = self._template.spec, list(self._template.notes)
        middle = -(-rows // 2)
        most = cores() if hasattr(socket, "send_fds") else 0  # workers need what Windows does not have
        self.workers = min(most if self.config.workers == "auto" else self.config.workers, rows)
        self.kind = f"Python environments in {self.workers} worker processes" if self.workers else "Python environments in turn"
        two = self.workers != 0 and self.config.overlap and rows > 1
        self.halves = (slice(0, middle), slice(middle, rows)) if two else (slice(0, rows),)
        self.begun_anew = torch.zeros(rows, dtype=torch.bool, device=self.device)  # by set_state, where nothing else would do
        self._pool: Serial | WorkerPool | None = None
        self._constants: dict[tuple[int, int, bool], Tensor] = {}

    @property
    def conversions(self) -> dict[str, Conversion]:
        return self._template.conversions or super().conversions

    # --- the contract ---

    def reset(self, noise: Tensor) -> Frame:
        everybody = slice(0, self.rows)
        self._write_seeds(everybody, noise)
        self.pool.reset()
        self._history = _History(self.whole[("seed",)], self.halves)
        self._last_frame = self._snapshot("new", everybody)
        self._require_finite(everybody, self._last_frame)
        return self._frame(self._snapshot("new", everybody), np.ones(self.rows, bool))

    def step(self, actions: dict[str, Tensor], noise: Tensor) -> Outcome:
        everybody, pool = slice(0, self.rows), self.pool
        asked: list[int | None] = [None] if pool.sound else [*range(len(self.halves))]
        self._write_actions(everybody, actions, noise)
        for k in asked:
            pool.step(k)
        return self._outcome(everybody, [i for k in asked for i in pool.wait(k)])

    def send(self, k: int, actions: dict[str, Tensor], noise: Tensor) -> None:
        """Have the rows of half `k` stepped: actions [rows of the half, N, ...] in the space's own units."""
        self._write_actions(self.halves[k], actions, noise)
        self.pool.step(k)

    def receive(self, k: int) -> Outcome:
        """What came of it."""
        return self._outcome(self.halves[k], self.pool.wait(k))

    def get_state(self) -> dict[str, Any]:
        """Each row's seed, its actions since, and what they led to."""
        seen = [torch.from_numpy(x.copy()) for x in self._last_frame.values()]
        return {"seeds": torch.from_numpy(self._history.seeds.copy()), "actions": self._history.actions(), "seen": seen}

    def set_state(self, state: dict[str, Any]) -> Frame:
        seeds, steps = state["seeds"].numpy(), [_steps(actions) for actions in state["actions"]]
        if len(seeds) != self.rows:
            raise UserError(f"this state has {len(seeds)} rows and the world {self.rows}: make the world with as many.")
        changed = ~np.array(self.pool.forward(seeds.clip(0), steps)) | (seeds < 0)
        for x, y in zip(self._snapshot("new", slice(None)).values(), (t.numpy() for t in state["seen"]), strict=True):
            changed |= ~((x == y) | ((x != x) & (y != y))).reshape(self.rows, -1).all(1)
        if changed.any():
            seeds = np.where(changed, (abs(seeds) * 48271 + 11) % (1 << 2 * BITS), seeds)
            steps = [[] if begins_anew else s for begins_anew, s in zip(changed, steps, strict=True)]
            self.whole[("seed",)][:] = seeds
            self.pool.reset(np.flatnonzero(changed).tolist())
            self.news.append(
                f"{changed.sum()} of {self.rows} rows did not come out the same when their episode was played again: new "
                "episodes began there, and from here on this run is not bit for bit the one that was stopped."
            )
        self.begun_anew = self._tensor(changed)
        self._history = _History(seeds, self.halves, steps)
        self._last_frame = self._snapshot("new", slice(0, self.rows))
        self._require_finite(slice(0, self.rows), self._last_frame)
        return self._frame(self._snapshot("new", slice(0, self.rows)), np.array([not s for s in steps]))

    def mark(self) -> Any:
        """Where the rows stand, as cheap as it can be had; after `rewind` to it, that is the state that `get_state` gives."""
        return self._history.copy(), {place: x.copy() for place, x in self._last_frame.items()}

    def rewind(self, mark: Any) -> None:
        """The rows themselves cannot go back: nobody steps them again."""
        self._history, self._last_frame = mark

    def draw(self, row: int = 0) -> Sketch | None:
        """A picture, where the environment has one and was `drawn` from the beginning."""
        picture = self.pool.picture(row)
        return None if picture is None else Sketch((), picture=np.asarray(picture))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def pool(self) -> Serial | WorkerPool:
        """Who steps the rows; made at the first need."""
        if self._pool is None:
            cls, c = type(self), self.config
            make = Maker(cls.__module__, cls.__qualname__, self._own, pickle.dumps(c), self.drawn, self._files)
            halves = [(h.start, h.stop) for h in self.halves]
            if self.workers:
                workers = self.rows if self.drawn else self.workers  # some libraries draw one picture a process
                self._pool = WorkerPool(make, self._template, self.rows, halves, workers, c.timeout, c.start, self.news)
            else:
                self._pool = Serial(make, self._template, self.rows, halves)
            self.whole = self._pool.whole
            self._frames = {f: [(p[1:], x) for p, x in self.whole.items() if p[0] == f] for f in ("now", "new")}
            self._reward_places = [place for place in self.whole if place[0] in ("reward", "shaping")]
            weakref.finalize(self, self._pool.close)
        return self._pool

    @property
    def restarts(self) -> int:  # type: ignore[override]
        """Workers that were replaced so far."""
        return getattr(self._pool, "restarts", 0)

    # --- inside ---

    def _flags(self, g: Group, rows: int, value: bool) -> Tensor:
        """One object for all steps, by which whoever gathers them knows a constant."""
        key = g.n, rows, value
        if key not in self._constants:
            self._constants[key] = torch.full((rows, g.n), value, device=self.device)
        return self._constants[key]

    def _write_actions(self, rows: slice, actions: dict[str, Tensor], noise: Tensor) -> None:
        """Where those who step these rows will find it."""
        self._write_seeds(rows, noise)
        taken = {g: np.array(a.cpu()) for g, a in actions.items()}  # copies: they are kept
        for g, a in taken.items():
            alive: Snapshot = {(g, "alive"): self._last_frame[g, "alive"][rows]} if (g, "alive") in self._last_frame else {}
            self._require_finite(rows, {("action", g): a, **alive})
            self.whole["action", g][rows] = a
        self._history.add(rows, taken)

    def _write_seeds(self, rows: slice, noise: Tensor) -> None:
        """Seeds for the episodes that begin next."""
        halves_of_seed = (noise.cpu().numpy() * (1 << BITS)).astype(np.int64)
        self.pool.whole[("seed",)][rows] = halves_of_seed[:, 0] << BITS | halves_of_seed[:, 1]

    def _outcome(self, rows: slice, lost: list[int]) -> Outcome:
        """Of a step of these rows; `lost` are those whose worker was replaced."""
        whole = self.whole
        following = self._snapshot("now", rows)
        if lost:
            at = [i - rows.start for i in lost]
            for place, x in following.items():
                x[at] = False if place[-1] == "start" else self._last_frame[place][lost]
            whole[("over",)][lost] = True
            for place, x in whole.items():
                if place[0] in ("reward", "terminated", "shaping", "stats"):
                    x[lost] = 0
        self._require_finite(rows, {**following, **{place: whole[place][rows] for place in self._reward_places}})
        over = whole[("over",)][rows].copy()
        seen, ended = following, bool(over.any())
        if ended:
            self._history.ended(rows, over, whole[("seed",)])
            seen = {place: x.copy() for place, x in following.items()}
            for place, x in seen.items():
                x[over] = whole["new", *place][rows][over]
            self._require_finite(rows, seen)
        for place, x in seen.items():
            self._last_frame[place][rows] = x
        next_frame = self._frame(following, None)
        frame = self._frame(seen, over) if ended else next_frame
        results = {g.name: self._result(g, rows) for g in self.spec.groups}
        stats = {name: self._tensor(whole[("stats",)][rows, j].copy()) for j, name in enumerate(self.spec.stats)}
        gone = self._no_rows(len(over)) if not lost else self._tensor(np.isin(np.arange(rows.start, rows.stop), lost))
        return Outcome(results, self._tensor(over), stats, next_frame, frame, gone)

    def _require_finite(self, rows: slice, arrays: Snapshot) -> None:
        """Nothing that these rows gave or are given is infinite or NaN, but what the dead see and do."""
        for place, x in arrays.items() if self.checks_finite else ():
            if x.dtype.kind != "f" or np.isfinite(x).all():
                continue
            kind, name = place if len(place) == 2 else ("observation", place[0]) if len(place) == 3 else ("state", "")
            wide = x.reshape(len(x), self.spec[name].n if name else 1, -1)  # [rows, N, ...]
            bad = ~np.isfinite(wide).all(-1)
            if kind in ("observation", "action") and (name, "alive") in arrays:
                bad &= arrays[name, "alive"]
            for i, agent in np.argwhere(bad):
                values, of = wide[i, agent], f" of {self.spec[name].agents[agent]}" if name else ""
                seed, step = self._history.at(row := rows.start + int(i))
                when = f"at step {step} of the episode that began with seed {seed}" if seed >= 0 else "far into an episode"
                what = f"the {kind}{of} in row {row} is {values[~np.isfinite(values)][0]} {when}"
                raise NotFiniteError(what, diverged=kind == "action")

    def _no_rows(self, rows: int) -> Tensor:
        return self._constants.setdefault((0, rows, False), torch.zeros(rows, dtype=torch.bool, device=self.device))

    def _tensor(self, x: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(x)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def _snapshot(self, frame: str, rows: slice) -> Snapshot:
        """A copy: what is shared is written over."""
        return {place: x[rows].copy() for place, x in self._frames[frame]}

    def _frame(self, snapshot: Snapshot, start: np.ndarray | None) -> Frame:
        """As tensors; in groups where nobody comes or goes, all agents start where `start` [rows] says."""
        views, rows = {}, len(next(iter(snapshot.values())))
        for g in self.spec.groups:
            named = {name: self._tensor(snapshot[g.name, "obs", name]) for name, _ in parts(g)}
            obs = named if isinstance(g.obs, dict) else named[""]
            legal = self._tensor(snapshot[g.name, "legal"]) if g.masked else None
            if (g.name, "alive") in snapshot:
                alive, active, begins = (self._tensor(snapshot[g.name, flag]) for flag in ("alive", "active", "start"))
            else:
                alive = active = self._flags(g, rows, True)
                begins = self._flags(g, rows, False) if start is None else self._tensor(start)[:, None].expand(rows, g.n)
            views[g.name] = View(obs, alive, active, begins, legal)
        return Frame(views, self._tensor(snapshot[("state",)]) if self.spec.state is not None else None)

    def _result(self, g: Group, half: slice) -> Result:
        reward, terminated, shaping = (
            self._tensor(self.whole[kind, g.name][half].copy()) if (kind, g.name) in self.whole else None
            for kind in ("reward", "terminated", "shaping")
        )
        assert reward is not None
        assert terminated is not None
        return Result(reward, terminated, shaping)

    whole: Arrays
    _frames: dict[str, list[tuple[tuple[str, ...], np.ndarray]]]  # now and new
    _reward_places: list[tuple[str, ...]]  # the places of rewards and shaping
    _history: _History
    _last_frame: Snapshot  # of all rows


# --- what is needed to play an episode again --------------------------------------------------------------------------


class _History:
    """Each row's seed and its actions since: the steps of each half in a list, and where in it a row's episode began."""

    def __init__(self, seeds: np.ndarray, halves: tuple[slice, ...], steps: list[Steps] | None = None):
        self.seeds, self.halves, rows = seeds.copy(), halves, len(seeds)
        self.began = np.zeros(rows, np.int64)
        self.log: list[Steps] = [[] for _ in halves]
        for k, half in enumerate(halves if steps else ()):
            mine = steps[half]  # type: ignore[index]
            longest = max(len(s) for s in mine)
            blank = next(({g: np.zeros_like(x) for g, x in s[0].items()} for s in mine if s), {})
            filled = [[blank] * (longest - len(s)) + s for s in mine]  # all end now
            self.log[k] = [{g: np.stack([s[t][g] for s in filled]) for g in blank} for t in range(longest)]
            self.began[half] = [longest - len(s) for s in mine]

    def copy(self) -> _History:
        other = _History(self.seeds, self.halves)
        other.began, other.log = self.began.copy(), [list(log) for log in self.log]
        return other

    def add(self, rows: slice, actions: dict[str, np.ndarray]) -> None:
        for k, half in enumerate(self.halves):
            if rows.start <= half.start and half.stop <= rows.stop:
                at = slice(half.start - rows.start, half.stop - rows.start)
                self._add(self.log[k], {g: a[at] for g, a in actions.items()}, half)

    def _add(self, log: Steps, actions: dict[str, np.ndarray], half: slice) -> None:
        log.append(actions)
        if len(log) % 64:
            return
        began, seeds = self.began[half], self.seeds[half]
        if len(log) > LONGEST:  # nobody can wait for that to be played again
            seeds[began == 0] = -1
            began[began == 0] = len(log)
        first = int(began.min())
        del log[:first]
        began -= first

    def ended(self, rows: slice, over: np.ndarray, seeds: np.ndarray) -> None:
        for i in np.flatnonzero(over) + rows.start:
            k = next(k for k, half in enumerate(self.halves) if i < half.stop)
            self.began[i], self.seeds[i] = len(self.log[k]), seeds[i]

    def at(self, row: int) -> tuple[int, int]:
        """The seed of a row's episode, -1 where it is not kept, and the steps since."""
        k = next(k for k, half in enumerate(self.halves) if row < half.stop)
        return int(self.seeds[row]), len(self.log[k]) - int(self.began[row])

    def actions(self) -> list[dict[str, Tensor]]:
        """For each row the actions by group, [steps, N, ...]."""
        out = []
        for log, half in zip(self.log, self.halves, strict=True):
            for j, first in enumerate(self.began[half]):
                mine = log[first:]
                out.append({g: torch.from_numpy(np.stack([s[g][j] for s in mine])) for g in (mine[0] if mine else ())})
        return out


def _steps(actions: dict[str, Tensor]) -> Steps:
    arrays = {g: x.numpy() for g, x in actions.items()}
    return [{g: x[t] for g, x in arrays.items()} for t in range(len(next(iter(arrays.values()), ())))]
