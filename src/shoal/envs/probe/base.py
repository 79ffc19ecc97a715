"""What the probe worlds share: tiny native worlds whose answers are known, so that a wrong sign or mask shows in seconds.

    world.answer            best and random episode returns, and the floor that a learner's greedy policy must reach
    world.solution(state)   the best actions in a state, for those who want to see the best return paid
    world.states()          `Valued` worlds alone: every state that can be acted in, one a row
    world.frames()          what is seen in them: evaluate a critic on this ...
    world.values(gamma)     ... and compare with this, group -> [states, N], where `active` holds (zero elsewhere)

Values are those of the best policy; where `world.idle` is true no action matters, and they are those of any policy.
They are written here in closed form, apart from `ops/returns.py`, because they are there to catch it out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shoal.envs.base import State, World
from shoal.spec import Box, Discrete, EnvSpec, Frame, Group, MultiDiscrete, Space, UserError

Kind = Literal["discrete", "multi", "continuous"]
SPACES: dict[str, Space] = {
    "discrete": Discrete(3),
    "multi": MultiDiscrete((3, 2)),
    "continuous": Box((-2.0, 0.0), (1.0, 2.0)),  # unequal and off centre, so that a slip in scaling shows
}


@dataclass(frozen=True)
class Answer:
    """Episode returns, mean over a group's agents: group -> return."""

    best: dict[str, float]  # of the policy that is paid best; reported, so without the shaping
    random: dict[str, float]  # of uniform choice among what is legal
    slack: float = 0.5  # how far below the best a learner may stay
    least: dict[str, float] | None = None  # what a learner must reach where theory does not promise the best

    @property
    def floor(self) -> dict[str, float]:
        """What a learner's greedy policy must reach."""
        return self.least if self.least is not None else {g: x - self.slack for g, x in self.best.items()}


@dataclass(frozen=True)
class Crowd:
    """Settings that most probes have."""

    n: int = 1  # agents
    actions: Kind = "discrete"  # kind of actions: discrete, multi or continuous

    def __post_init__(self) -> None:
        if not 1 <= self.n <= 8:
            raise UserError(f"--env.n is {self.n}: a probe has 1 to 8 agents.")
        check(self.actions, Kind, "actions")


class Probe(World, ABC):
    """A world with a known answer."""

    fixed_length = True

    @property
    @abstractmethod
    def answer(self) -> Answer: ...

    @abstractmethod
    def solution(self, state: State) -> dict[str, Tensor]:
        """The best actions, in the space's own units. `state` may know more than the agents see."""

    def last(self, state: State) -> Tensor:
        return torch.eq(state["clock"] + 1, self.spec.horizon or 0)  # [B] the step to come is the row's last

    def sign(self, noise: Tensor) -> Tensor:
        return torch.where(noise < 0.5, -1.0, 1.0).to(self.dtype)

    def onehot(self, index: Tensor, n: int) -> Tensor:
        return (index[..., None] == torch.arange(n, device=self.device)).to(self.dtype)  # zeros for an index past the end


class Valued(Probe, ABC):
    """A probe whose values are known too."""

    idle: bool = False  # no action matters: the values are those of any policy

    @abstractmethod
    def states(self) -> State: ...

    @abstractmethod
    def values(self, gamma: float) -> dict[str, Tensor]: ...

    def frames(self) -> Frame:
        states = self.states()
        rows = states["clock"].shape[0]
        return type(self)(self.config, rows, self.device, self.dtype).set_state(states)

    def every(self, *parts: list[Any]) -> list[Tensor]:
        """All combinations of the parts: a tensor [states, ...] for each of them."""
        columns = zip(*product(*parts), strict=True)
        return [self.tensor(c, None if isinstance(c[0], float | tuple) else torch.long) for c in map(list, columns)]

    def signs(self, n: int) -> list[Any]:
        return list(product((-1.0, 1.0), repeat=n))


class Idle(Valued, ABC):
    """A probe in which no action matters, of one group of `n` agents."""

    idle = True

    @dataclass(frozen=True)
    class Config(Crowd):
        pass

    def assemble(self, obs: int, horizon: int, common: bool = True) -> None:
        n = self.config.n
        self.spec = EnvSpec((agent_group(n, obs, SPACES[self.config.actions]),), common=common or n == 1, horizon=horizon)

    def solution(self, state: State) -> dict[str, Tensor]:
        space, n = self.spec.groups[0].action, self.config.n
        dtype = self.dtype if space.kind == "continuous" else torch.long
        return {"agents": torch.zeros(self.rows, n, *space.shape, dtype=dtype, device=self.device)}

    def all_agents(self, x: Tensor) -> dict[str, Tensor]:
        return {"agents": x[:, None].expand(-1, self.config.n)}  # [states] -> [states, N]


class Countdown(Idle, ABC):
    """An idle probe that pays 1 each step and ends, one way or the other, after `length` of them."""

    @dataclass(frozen=True)
    class Config(Crowd):
        length: int = 5  # steps until the end
        stagger: bool = False  # begin at a random step, so that rows end at different times

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.length < 1:
                raise UserError(f"--env.length is {self.length}: an episode needs at least one step.")

    def count_down(self, obs: int) -> None:
        self.assemble(obs=obs, horizon=self.config.length)
        self.one = self.tensor(1.0).expand(self.rows, self.config.n)
        self.fixed_length, self.noise_begin = not self.config.stagger, int(self.config.stagger)

    def begin(self, noise: Tensor) -> State:
        if not self.config.stagger:
            return {"step": torch.zeros(self.rows, dtype=torch.long, device=self.device)}
        return {"step": (noise[:, 0] * self.config.length).long().clamp(max=self.config.length - 1)}

    @property
    def answer(self) -> Answer:
        steps = (self.config.length + 1) / 2 if self.config.stagger else float(self.config.length)
        return Answer({"agents": steps}, {"agents": steps})


class Copying:
    """A symbol to be copied, for any kind of action.

    Paid for each symbol: 1 if copied (discrete), the share of dimensions copied (multi), or minus the mean squared
    error (continuous). A uniform guess earns 1 / n, the mean of 1 / n, or -mean(width ** 2) / 6; the worst answer earns
    0, or -7 / 12 mean(width ** 2), which is the mean square distance to the far corner.
    """

    def __init__(self, space: Space, world: World):
        self.space, self.world = space, world
        if isinstance(space, Box):
            self.low, self.range = world.tensor(space.low), world.tensor(space.high) - world.tensor(space.low)
            self.width, self.draws = len(space.low), len(space.low)
            square = sum((h - x) ** 2 for x, h in zip(space.low, space.high, strict=True)) / self.draws
            self.best, self.random, self.worst = 0.0, -square / 6, -square * 7 / 12
        else:
            self.width, self.draws = sum(space.sizes), len(space.sizes)
            self.sizes = world.index(space.sizes)
            self.dim = world.index([d for d, n in enumerate(space.sizes) for _ in range(n)])  # [A] whose choice it is
            self.choice = world.index([c for n in space.sizes for c in range(n)])  # [A] and which
            self.best, self.random, self.worst = 1.0, sum(1 / n for n in space.sizes) / self.draws, 0.0

    def draw(self, noise: Tensor) -> Tensor:
        """noise [B, N * draws] -> symbols [B, N, D]."""
        noise = noise.unflatten(-1, (-1, self.draws))
        if isinstance(self.space, Box):
            return self.low + noise * self.range
        return torch.minimum((noise * self.sizes).long(), self.sizes - 1)

    def show(self, symbol: Tensor) -> Tensor:
        """The symbol as seen, [B, N, width]: itself where continuous, else one-hot end to end."""
        if isinstance(self.space, Box):
            return symbol
        return (symbol[..., self.dim] == self.choice).to(self.world.dtype)

    def score(self, symbol: Tensor, action: Tensor) -> Tensor:
        if isinstance(self.space, Box):
            return -(action.to(self.world.dtype) - symbol).square().mean(-1)
        return (self.spread(action) == symbol).to(self.world.dtype).mean(-1)  # [B, N]

    def spread(self, action: Tensor) -> Tensor:
        return action[..., None] if isinstance(self.space, Discrete) else action  # [B, N, D]

    def copy(self, symbol: Tensor) -> Tensor:
        return symbol[..., 0] if isinstance(self.space, Discrete) else symbol


def agent_group(n: int, obs: int, space: Space, name: str = "agents", **more: Any) -> Group:
    stem = "agent" if name == "agents" else name
    return Group(name, more.pop("team", name), tuple(f"{stem}_{i}" for i in range(n)), (obs,), space, **more)


def annuity(gamma: float, steps: Tensor) -> Tensor:
    """1 + gamma + ... : the worth of 1 in each of `steps` steps."""
    return steps if gamma == 1 else (1 - gamma**steps) / (1 - gamma)


def check(value: str, allowed: Any, flag: str) -> None:
    if value not in get_args(allowed):
        raise UserError(f"--env.{flag} is {value!r}: choose one of {', '.join(get_args(allowed))}.")
