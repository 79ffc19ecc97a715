"""The environment: B rows stepped together, tensors in and tensors out.

`Environment` is the contract. `World` is how a native one is written: three pure functions of tensors and noise, of
which `step` is made here, so that a kernel or a captured graph does them in one trip:

    begin(noise)                  -> state     new episodes for all rows
    advance(state, actions, noise) -> Move      one step: the new state and what it paid
    observe(state)                -> Frame     what the agents see

State is a dict of tensors whose first dimension is the row; `clock` [B] counts an episode's steps and is kept here.
Nothing here draws: noise is uniform numbers in [0, 1) that the owner of a generator passes in. Shapes are static and
nothing waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.envs.conversions import Conversion, direct
from shoal.envs.drawing import Sketch
from shoal.envs.limits import refuse_more_than_fits, refuse_too_many_rows
from shoal.spec import EnvSpec, Frame, Outcome, Result, UserError, View
from shoal.tree import where_rows

State = dict[str, Tensor]
Phase = Literal["middle", "last", "any"]  # what the host knows: no row is over after this step, all are, or neither
Transition = Callable[[Phase, State, dict[str, Tensor], Tensor], tuple[State, Outcome]]  # of state, actions and noise


class Environment(ABC):
    """The contract that the collector, the evaluation and the tools see."""

    @dataclass(frozen=True)
    class Config:
        pass

    spec: EnvSpec
    rows: int
    device: torch.device
    kind: str = "rows stepped by its library"  # how rows are stepped, for the log
    noise: int = 0  # uniform numbers a row takes each step
    fixed_length: bool = False  # no episode ends before its horizon: rows stay in step, known without looking
    drawn: bool = False  # somebody will ask for drawings: set before the first reset
    widest: int = 256  # rows of an evaluation at most
    begun_anew: Tensor | None = None  # [B] where `set_state` could not restore a row, and it began anew; none: it always can
    news: list[str] = []  # sentences for whoever trains on this, who takes them out
    halves: tuple[slice, ...] = ()  # of a world in other processes: rows that `send` and `receive` step apart from the others
    restarts: int = 0  # of such processes, so far

    @property
    def conversions(self) -> dict[str, Conversion]:
        """How the loop of the environment's own library speaks, by agent, in its order; of a native world as its spec does."""
        return direct(self.spec)

    @abstractmethod
    def reset(self, noise: Tensor) -> Frame:
        """New episodes in every row. noise [B, self.noise]."""

    @abstractmethod
    def step(self, actions: dict[str, Tensor], noise: Tensor) -> Outcome:
        """Actions in the space's own units, a tensor a group. noise [B, self.noise]."""

    @abstractmethod
    def get_state(self) -> dict[str, Any]: ...

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> Frame: ...

    def draw(self, row: int = 0) -> Sketch | None:
        """Shapes for the renderer, or a picture."""
        return None

    def close(self) -> None:
        return None


@dataclass
class Move:
    """What `advance` returns. `ended` ends a row's episode; where nobody has `terminated` in the results, it was truncated, and
    is bootstrapped. The horizon is looked after in `World`."""

    state: State
    results: dict[str, Result]
    ended: Tensor | None = None  # [B]; none: an episode lasts exactly its horizon
    stats: dict[str, Tensor] = field(default_factory=dict)


class World(Environment, ABC):
    """A native environment. An author sets `spec` and the two noise widths and writes begin, advance and observe."""

    kind = "native tensors"
    noise_begin: int = 0
    noise_step: int = 0

    def __init__(
        self, config: Any = None, rows: int = 1, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ):
        self.config: Any = config if config is not None else self.Config()
        self.rows, self.device, self.dtype = rows, torch.device(device), dtype
        refuse_too_many_rows(rows, self.device)
        self.setup()
        refuse_more_than_fits(self.spec, self.device, rows, 2)
        self.noise = self.noise_begin + self.noise_step
        self._lockstep = self._in_step = self.fixed_length
        self._tick = 0
        self._do: Transition = self._transition  # or the one kernel that `fuse` made of it
        self._yes = torch.ones(rows, dtype=torch.bool, device=self.device)
        self._no = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self._constants: dict[tuple[bool, int], Tensor] = {}

    @abstractmethod
    def setup(self) -> None:
        """Set `spec`, `noise_begin`, `noise_step` and constant tensors, from `config`."""

    @abstractmethod
    def begin(self, noise: Tensor) -> State: ...

    @abstractmethod
    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move: ...

    @abstractmethod
    def observe(self, state: State) -> Frame: ...

    # --- the contract, made of the three ---

    def reset(self, noise: Tensor) -> Frame:
        self.state = self._begun(noise)
        self._tick, self._in_step = 0, self._lockstep
        return self.observe(self.state)

    def step(self, actions: dict[str, Tensor], noise: Tensor) -> Outcome:
        tick = self._tick + 1
        phase: Phase = "any" if not self._in_step else "middle" if tick < (self.spec.horizon or 0) else "last"
        self.state, outcome = self._do(phase, self.state, actions, noise)
        self._tick = 0 if phase == "last" else tick
        return outcome

    def hold(self, steps: int) -> None:
        """Make rollouts of so many steps all alike, for whoever captures one: with masks, unless each ends an episode."""
        self._lockstep = self.fixed_length and steps % (self.spec.horizon or 1) == 0
        self._in_step = self._in_step and self._lockstep

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Those that steps will have, unless rows fall out of step."""
        return (("last",) if self.spec.horizon == 1 else ("middle", "last")) if self._lockstep else ("any",)

    @property
    def phase(self) -> int:
        """What the host knows of the rows, which decides what a step does: how far in they are, or -1: it knows nothing."""
        return self._tick if self._in_step else -1

    @phase.setter
    def phase(self, phase: int) -> None:
        self._in_step, self._tick = phase >= 0, max(phase, 0)

    def fuse(self) -> str | None:
        """Make one kernel of the whole step, see `kernels/world.py`. None when done; else why not, and nothing has changed."""
        from shoal.ops.kernels import fuse_world

        return fuse_world(self)

    def _transition(self, phase: Phase, state: State, actions: dict[str, Tensor], noise: Tensor) -> tuple[State, Outcome]:
        """What a step is: a pure function, and each of its rows a function of that row alone."""
        clock = state["clock"] + 1
        move = self.advance(state, actions, noise[:, self.noise_begin :].to(self.dtype))
        new = {**move.state, "clock": clock}
        next_frame = self.observe(new)
        if phase == "middle":
            return new, Outcome(move.results, self._no, move.stats, next_frame, next_frame)
        over, begun = self._yes if phase == "last" else self._over(move, clock), self._begun(noise)
        new = begun if phase == "last" else where_rows(over, begun, new)
        return new, Outcome(move.results, over, move.stats, next_frame, self.observe(new))

    def _over(self, move: Move, clock: Tensor) -> Tensor:
        """[B] whose episode ended with this move, or is at the horizon."""
        over = self._no if self.spec.horizon is None else clock >= self.spec.horizon
        return over if move.ended is None else over | move.ended

    def get_state(self) -> dict[str, Any]:
        return {k: v.clone() for k, v in self.state.items()}

    def set_state(self, state: dict[str, Any]) -> Frame:
        """Take a state over, as `get_state` gave it; parts of another dtype or device are converted."""
        floating = {k: v.is_floating_point() for k, v in state.items()}
        self.state = {k: v.to(self.device, self.dtype if floating[k] else v.dtype).clone() for k, v in state.items()}
        clock = self.state["clock"]
        if clock.shape != (self.rows,):
            raise UserError(f"this state has {clock.shape[0]} rows and the world {self.rows}: make the world with as many.")
        self._tick = int(clock[0])
        self._in_step = self._lockstep and bool((clock == clock[0]).all())
        return self.observe(self.state)

    # --- for authors ---

    def view(self, obs: Tensor, clock: Tensor, legal: Tensor | None = None) -> View:
        """The view of a group whose agents are always there and always to move."""
        alive = self.always(obs.shape[1])
        return View(obs, alive, alive, (clock == 0)[:, None].expand_as(alive), legal)

    def always(self, n: int) -> Tensor:
        return self._constant(self._yes, n)  # [B, N] everybody

    def never(self, n: int) -> Tensor:
        return self._constant(self._no, n)  # [B, N] nobody

    def _constant(self, x: Tensor, n: int) -> Tensor:
        """One object for all steps, by which whoever gathers them knows a constant."""
        key = (x is self._yes, n)
        if key not in self._constants:
            self._constants[key] = x[:, None].expand(self.rows, n)
        return self._constants[key]

    def tensor(self, x: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.as_tensor(x, dtype=dtype or self.dtype, device=self.device)

    def index(self, x: Sequence[Any]) -> Tensor:
        return torch.as_tensor(x, dtype=torch.long, device=self.device)

    def _begun(self, noise: Tensor) -> State:
        clock = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        return {**self.begin(noise[:, : self.noise_begin].to(self.dtype)), "clock": clock}
