"""EnvPool (Weng et al., 2022, https://arxiv.org/abs/2206.10558): environments in C++, stepped by threads of its own.

    shoal train ppo envpool/CartPole-v1 --env.threads 4

The id is any of EnvPool's tasks of one agent, `envpool/Pong-v5`, always with `envpool/` before it: the bare name is
Gymnasium's. What an agent sees and does is as `spaces.py` says; one vector is read in one go, pictures and named parts
row by row. Actions are one choice, or numbers within bounds; tasks with other ones are refused. Settings are EnvPool's
defaults; what it reports beside rewards is not read, and a mask that is part of an observation is only seen. There are no
workers and no drawings.

**Ends.** Left alone, EnvPool begins a finished row's next episode on the step after its last one, and that step is no
transition. Here such rows are begun again within the step: `next` holds the last observation, `frame` the first of the new
episode. An episode that reaches the task's limit is truncated, even if it would have terminated in that very step: EnvPool
does not say which.

**Seeds.** EnvPool takes seeds when it is made and none afterwards: each `reset` makes it anew, a seed a row, of the noise
passed in, and EnvPool draws the rest, later episodes too, from these. The same noise at `reset` and the same actions give
the same numbers in a row, however many threads or other rows there are. Noise passed to `step` changes nothing.

**State** cannot be read out of EnvPool. `get_state` keeps the seeds and the number of steps since; `set_state` begins new
episodes in all rows, from seeds made of those (the same each time), `news` says so, and `begun_anew` holds for every row.
A resumed run is whole, but not bit for bit the one that was stopped.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from shoal.envs.base import Environment
from shoal.envs.conversions import Conversion, conversion
from shoal.envs.spaces import Moves, Observer, kind_of
from shoal.envs.workers import cores
from shoal.ids import near
from shoal.spec import Box, EnvSpec, Frame, Group, Outcome, Result, UserError, View
from shoal.tree import tree_map

GROUP = "agents"
BITS = 15  # of a seed, from each of two uniform numbers
ENDLESS = 2**31 - 1  # of steps and of bounds: none

Seen = dict[str, np.ndarray]  # part of an observation, "" where it has none -> [rows, 1, ...]


def claims(id: str) -> bool:
    """Never: a bare id is Gymnasium's."""
    return False


class EnvPool(Environment):
    rest: ClassVar[str] = "ID"

    @dataclass(frozen=True)
    class Config:
        id: str = "CartPole-v1"  # the task
        threads: Literal["auto"] | int = "auto"  # of EnvPool's, that step the rows; auto: one a core, at most one a row

        def __post_init__(self) -> None:
            if self.threads != "auto" and not 1 <= self.threads <= 4096:
                raise UserError(f"--env.threads is {self.threads}: it takes a number of threads, at least 1, or auto.")

    noise = 2  # uniform numbers of which a row's seed is made

    def __init__(
        self, config: Any = None, rows: int = 1, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ):
        self.config: Any = config if config is not None else self.Config()
        self.rows, self.device = rows, torch.device(device)
        with _quiet():
            inside = self._made("make_spec")
            action, observations = inside.action_space, inside.observation_space
        what, wanted = f"envpool's {self.config.id}", [*inside.action_array_spec.values()][-1]
        if inside.config.max_num_players != 1:
            raise UserError(f"{what} is for {inside.config.max_num_players} players: Shoal takes EnvPool's tasks of one.")
        if kind_of(action) != "Discrete" and not _bounded(action):
            raise UserError(f"{what} has actions that are {action}: Shoal takes one choice of EnvPool's, or bounded numbers.")
        self._moves, self._observer = Moves(action), Observer(observations)
        self._conversion = conversion(observations, action)
        self._conversion.action["dtype"] = str(np.dtype(wanted.dtype))
        self._wants = wanted.dtype, tuple(n for n in wanted.shape if n != -1), int(getattr(action, "start", 0))
        self._vector = kind_of(observations) == "Box" and len(self._observer.shape) == 1
        limit = inside.config.max_episode_steps
        group = Group(GROUP, GROUP, ("agent_0",), self._observer.shape, self._moves.space)
        self.spec = EnvSpec((group,), common=True, horizon=limit if 0 < limit < ENDLESS else None)
        self.news = []
        self.begun_anew = torch.zeros(rows, dtype=torch.bool, device=self.device)  # by set_state
        self._always, self._never = (torch.full((rows, 1), value, device=self.device) for value in (True, False))
        self.inner: Any = None

    @property
    def conversions(self) -> dict[str, Conversion]:
        return {"agent_0": self._conversion}

    # --- the contract ---

    def reset(self, noise: Tensor) -> Frame:
        high, low = (noise.double() * (1 << BITS)).long().cpu().unbind(1)
        return self._begin((high << BITS | low).numpy())

    def step(self, actions: dict[str, Tensor], noise: Tensor) -> Outcome:
        obs, reward, terminated, truncated, _ = self.inner.step(self._taken(actions[GROUP].cpu().numpy()))
        self._steps += 1
        over, seen = terminated | truncated, self._look(obs, self.rows)
        following = frame = self._frame(seen, None)
        if over.any():
            ids = np.flatnonzero(over).astype(np.int32)
            begun, seen = self._look(self.inner.reset(ids)[0], len(ids)), {name: x.copy() for name, x in seen.items()}
            for name, x in seen.items():
                x[ids] = begun[name]
            frame = self._frame(seen, over)
        pay = Result(self._tensor(reward.astype(np.float32)[:, None]), self._tensor(terminated[:, None]))
        return Outcome({GROUP: pay}, self._tensor(over), {}, following, frame)

    def get_state(self) -> dict[str, Any]:
        return {"seeds": torch.from_numpy(self._seeds.copy()), "steps": self._steps}

    def set_state(self, state: dict[str, Any]) -> Frame:
        seeds = state["seeds"].cpu().numpy()
        if len(seeds) != self.rows:
            raise UserError(f"this state has {len(seeds)} rows and the world {self.rows}: make the world with as many.")
        self.news.append(
            "EnvPool cannot be put back into its state: new episodes began in all rows, and from here on this run is not bit "
            "for bit the one that was stopped."
        )
        self.begun_anew = self._always[:, 0].clone()
        return self._begin((seeds * 48271 + 11 + state["steps"]) % (1 << 2 * BITS))

    def close(self) -> None:
        self.inner = None  # its threads end with it

    # --- inside ---

    def _made(self, how: str, **given: Any) -> Any:
        """What EnvPool's function of that name gives for the task."""
        try:
            envpool = importlib.import_module("envpool")
        except ImportError as e:
            raise UserError(f"envpool is not installed ({e}): pip install envpool.") from None
        id, known = self.config.id, envpool.list_all_envs()
        if id not in known:
            raise UserError(f"envpool has no task {id!r}{near(id, known) or ', and none with a name like it'}.")
        try:
            return getattr(envpool, how)(id, **given)
        except Exception as e:  # whatever a task needs that is not there
            raise UserError(f"envpool's {id} could not be made: {type(e).__name__}: {str(e).rstrip('.')}.") from e

    def _begin(self, seeds: np.ndarray) -> Frame:
        """New episodes in all rows, and all that EnvPool draws from here on, from these seeds."""
        self._seeds, self._steps, threads = seeds, 0, self.config.threads
        threads = min(cores() if threads == "auto" else threads, self.rows)
        self.close()  # before the next: half the threads and memory
        with _quiet():
            self.inner = self._made("make_gymnasium", num_envs=self.rows, num_threads=threads, seed=seeds.tolist())
            obs, _ = self.inner.reset()
        return self._frame(self._look(obs, self.rows), np.ones(self.rows, bool))

    def _taken(self, action: np.ndarray) -> np.ndarray:
        """Actions [B, 1] or [B, 1, D] as EnvPool wants them: [B] or [B, ...]."""
        (dtype, shape, start), space = self._wants, self._moves.space
        taken = action.reshape(self.rows, *shape).astype(dtype)
        if not isinstance(space, Box):
            return taken + np.asarray(start, dtype)
        low, high = (np.reshape(np.array(side, dtype), shape) for side in (space.low, space.high))
        return np.clip(taken, low, high)  # what is scaled in float32 may lie beyond

    def _look(self, obs: Any, rows: int) -> Seen:
        """A copy of what some rows saw: EnvPool's arrays are its own."""
        if self._vector:
            return {"": np.array(obs, np.float32).reshape(rows, 1, -1)}
        shape, images = self._observer.shape, self._observer.images
        named = shape if isinstance(shape, dict) else {"": shape}
        seen = {name: np.empty((rows, 1, *s), images if len(s) == 3 else np.float32) for name, s in named.items()}
        for i in range(rows):
            place = {name: x[i, 0] for name, x in seen.items()}
            self._observer.write(tree_map(lambda x, i=i: x[i], obs), place if isinstance(shape, dict) else place[""])
        return seen

    def _frame(self, seen: Seen, start: np.ndarray | None) -> Frame:
        parts = {name: self._tensor(x) for name, x in seen.items()}
        begins = self._never if start is None else self._tensor(start)[:, None]
        obs = parts if isinstance(self._observer.shape, dict) else parts[""]
        return Frame({GROUP: View(obs, self._always, self._always, begins)})

    def _tensor(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(self.device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Gymnasium says, whenever EnvPool makes a space, on the precision of its bounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _bounded(space: Any) -> bool:
    """Whether it is numbers with bounds; where a task gives none, EnvPool's are the smallest and largest positive numbers."""
    return (
        kind_of(space) == "Box"
        and np.issubdtype(space.dtype, np.floating)
        and bool((space.low > -ENDLESS).all() and (space.high < ENDLESS).all())
    )
