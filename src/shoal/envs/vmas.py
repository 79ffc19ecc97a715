"""VMAS (Bettini et al., 2022, https://arxiv.org/abs/2207.03530): two-dimensional bodies in batches of tensors, on any device.

    shoal train mappo vmas/balance --env.args n_agents=4 --env.max-steps 200

The id is the name of a scenario, and settings of the scenario's own are `args`. VMAS steps all rows at once itself, in
float32, so that there are no workers. Episodes end where the scenario is done, which is a termination for all agents, or are
cut off after `max_steps`. Groups and teams are as in `pettingzoo.py`; numbers that a scenario reports beside the rewards
are not read.

Unlike a native world, VMAS draws for itself: for each step and each new episode it gets a seed that is made of the noise passed
in, and PyTorch's own generators are afterwards as they were. Which rows begin anew is looked up on the host, once a step.

State is every tensor and number that can be reached from VMAS's environment, by the way to it. Where one cannot be put back,
`set_state` begins new episodes, and `news` says so.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from shoal.envs.base import Environment
from shoal.envs.conversions import Conversion, Description, describe
from shoal.envs.drawing import Circle, Line, Sketch
from shoal.envs.grouping import group_agents, team_of_groups
from shoal.envs.pettingzoo import imported, made
from shoal.envs.spaces import Moves, kind_of
from shoal.flags import arguments
from shoal.ids import near
from shoal.spec import EnvSpec, Frame, Group, Outcome, Result, UserError, View
from shoal.tree import tree_leaves, where_rows

if TYPE_CHECKING:
    from vmas.simulator.environment import Environment as Inner

BITS = 15  # of a seed, from each of two uniform numbers


def claims(id: str) -> bool:
    """Whether a bare id is one of its scenarios."""
    return importlib.util.find_spec("vmas") is not None and id in scenarios()


class VMAS(Environment):
    rest: ClassVar[str] = "SCENARIO"

    @dataclass(frozen=True)
    class Config:
        id: str = ""  # the scenario, such as balance
        args: str = ""  # settings of the scenario's own: name=value,name=value
        actions: Literal["continuous", "discrete", "multi"] = "continuous"  # forces; one choice; a choice for each dimension
        max_steps: int = 100  # steps after which an episode is cut off
        groups: str = field(default="", metadata={"flag": False})  # what --regroup says
        teams: str = ""  # which groups win together: name=group+group, or all; those not named are teams of their own

        def __post_init__(self) -> None:
            if self.max_steps < 1:
                raise UserError(f"--env.max-steps is {self.max_steps}: an episode needs at least one step.")

    noise = 4  # two for the seed of a step, two for that of an episode

    def __init__(
        self, config: Any = None, rows: int = 1, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ):
        self.config: Any = config if config is not None else self.Config()
        self.rows, self.device = rows, torch.device(device)
        c, known = self.config, scenarios()
        if c.id not in known:
            raise UserError(f"vmas has no scenario {c.id!r}{near(c.id, known) or '; it has ' + ', '.join(known)}.")
        self.inner = self._made()
        agents = {a.name: i for i, a in enumerate(self.inner.agents)}
        moves = [Moves(space) for space in self.inner.action_space.spaces]
        looks = self._look()
        widths = [_flat(x).shape[1] for x in looks]
        self._conversions = {
            a: Conversion(_described(looks[i]), _wanted(self.inner.action_space.spaces[i])) for a, i in agents.items()
        }
        both = {a: (widths[i], moves[i].space) for a, i in agents.items()}
        members_of = group_agents(c.groups, list(agents), both)
        team_of = team_of_groups(c.teams, list(members_of))
        self.members = {name: [agents[a] for a in names] for name, names in members_of.items()}
        groups = (Group(n, team_of[n], tuple(a), (both[a[0]][0],), both[a[0]][1]) for n, a in members_of.items())
        self.spec = EnvSpec(tuple(groups), horizon=c.max_steps)
        self.news = list(dict.fromkeys(m.note for m in moves if m.note))
        self.clock = torch.zeros(rows, dtype=torch.long, device=self.device)
        self._always = {g.name: torch.ones(rows, g.n, dtype=torch.bool, device=self.device) for g in self.spec.groups}

    @property
    def conversions(self) -> dict[str, Conversion]:
        return self._conversions

    # --- the contract ---

    def reset(self, noise: Tensor) -> Frame:
        seeds = _seeds(noise[:, 2:])
        self._begin(range(self.rows), seeds)
        self.clock = torch.zeros_like(self.clock)
        self._seen = self._observed(self._look(seeds[-1]))
        return self._frame(self._seen)

    def step(self, actions: dict[str, Tensor], noise: Tensor) -> Outcome:
        taken: list[Any] = [None] * len(self.inner.agents)
        for group, at in self.members.items():
            for i, agent in enumerate(at):
                a = actions[group][:, i]
                taken[agent] = a if a.dim() == 2 else a[:, None]  # [B, D]
        with self._drawing(_seeds(noise[:1, :2])[0]):
            seen, rewards, done, _ = self.inner.step(taken)
        self.clock = self.clock + 1
        over = done | (self.clock >= self.config.max_steps)
        results = {
            g: Result(torch.stack([rewards[i] for i in at], 1), done[:, None].expand(-1, len(at)))
            for g, at in self.members.items()
        }
        self._seen = self._observed(seen)
        following = frame = self._frame(self._seen)
        begins = over.nonzero().flatten().tolist()
        if begins:
            seeds = _seeds(noise[:, 2:])
            self._begin(begins, seeds)
            self.clock = self.clock.masked_fill(over, 0)
            self._seen = where_rows(over, self._observed(self._look(seeds[-1])), self._seen)
            frame = self._frame(self._seen)
        return Outcome(results, over, {}, following, frame)

    def get_state(self) -> dict[str, Any]:
        values, links = _read(self.inner)
        seen = {g: x.clone() for g, x in self._seen.items()}
        return {"clock": self.clock.clone(), "seen": seen, "values": values, "links": links}

    def set_state(self, state: dict[str, Any]) -> Frame:
        if len(state["clock"]) != self.rows:
            raise UserError(
                f"this state has {len(state['clock'])} rows and the world {self.rows}: make the world with as many."
            )
        self.begun_anew = None
        with self._drawing(0):  # some of what it remembers is made in its first step
            self.inner.step([torch.zeros(self.rows, self.inner.get_agent_action_size(a)) for a in self.inner.agents])
        try:
            _write(self.inner, state["values"], state["links"], self.device)
        except (AttributeError, LookupError, TypeError) as e:
            self.begun_anew = torch.ones(self.rows, dtype=torch.bool, device=self.device)
            self.news.append(
                f"VMAS could not be put back into its state ({type(e).__name__}: {e}): new episodes began in all rows, and "
                "from here on this run is not bit for bit the one that was stopped."
            )
            return self.reset(torch.rand(self.rows, self.noise, generator=torch.Generator().manual_seed(0)))
        self.clock = state["clock"].to(self.device).clone()
        self._seen = {g: x.to(self.device).clone() for g, x in state["seen"].items()}
        return self._frame(self._seen)

    def draw(self, row: int = 0) -> Sketch:
        world = self.inner.world
        shapes = [_outline(e, row) for e in reversed(world.entities)]
        extent = max(float(world.x_semidim or 1), float(world.y_semidim or 1))
        return Sketch(
            tuple(s for one in shapes for s in one if isinstance(s, Circle)),
            extent=extent,
            segments=tuple(s for one in shapes for s in one if isinstance(s, Line)),
        )

    # --- inside ---

    def _made(self) -> Inner:
        c, make = self.config, imported("vmas").make_env
        kind = {"continuous_actions": c.actions == "continuous", "multidiscrete_actions": c.actions == "multi"}
        with warnings.catch_warnings(record=True) as said, self._drawing(None):  # it has a seed of its own
            warnings.simplefilter("always")
            inner = made(
                make, c, False, scenario=c.id, num_envs=self.rows, device=self.device, seed=0, clamp_actions=True, **kind
            )
        if any("not used by the scenario" in str(w.message) for w in said):
            names = ", ".join(arguments(c.args, "--env.args"))
            raise UserError(f"--env.args has a setting that the scenario {c.id} does not know: {names}.")
        return inner

    @contextmanager
    def _drawing(self, seed: int | None) -> Iterator[None]:
        """What is drawn in here follows from `seed`, and what is drawn outside does not notice."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            if seed is not None:
                self.inner.seed(seed)
            yield

    def _begin(self, rows: Any, seeds: list[int]) -> None:
        if len(rows) == self.rows:
            with self._drawing(seeds[0]):
                self.inner.reset(return_observations=False)
            return
        for i in rows:
            with self._drawing(seeds[i]):
                self.inner.reset_at(i, return_observations=False)

    def _look(self, seed: int = 0) -> list[Any]:
        with self._drawing(seed):  # some see through noise
            return self.inner.get_from_scenario(get_observations=True, get_rewards=False, get_infos=False, get_dones=False)[0]

    def _observed(self, seen: list[Any]) -> dict[str, Tensor]:
        return {g: torch.stack([_flat(seen[i]) for i in at], 1) for g, at in self.members.items()}  # [B, N, O]

    def _frame(self, seen: dict[str, Tensor]) -> Frame:
        begun = (self.clock == 0)[:, None]
        return Frame({g: View(x, self._always[g], self._always[g], begun.expand_as(self._always[g])) for g, x in seen.items()})

    _seen: dict[str, Tensor]


def scenarios() -> list[str]:
    """The scenarios that are installed, from the names of their files."""
    spec = importlib.util.find_spec("vmas")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("vmas is not installed: pip install vmas.")
    root = Path(spec.submodule_search_locations[0]) / "scenarios"
    return sorted(p.stem for p in root.rglob("*.py") if p.stem != "__init__")


def _described(obs: Any) -> Description:
    """The space of an agent's observation: VMAS says little of it."""
    if isinstance(obs, dict):
        return {"type": "Dict", "spaces": [[k, _described(x)] for k, x in obs.items()]}
    return {"type": "Box", "shape": list(obs.shape[1:]), "dtype": "float32"}


def _wanted(space: Any) -> Description:
    """The space of an agent's action; one choice is a number of its own, [B, 1]."""
    if kind_of(space) != "Discrete":
        return describe(space)
    return {"type": "MultiDiscrete", "nvec": [int(space.n)], "start": [0], "dtype": "int64"}


def _flat(obs: Any) -> Tensor:
    """An agent's observation, a tensor or named ones, as [B, O]."""
    return torch.cat([x.flatten(1) for x in tree_leaves(obs)], 1).float()


def _seeds(noise: Tensor) -> list[int]:
    """One of each row's two uniform numbers [B, 2]."""
    high, low = (noise.double() * (1 << BITS)).long().unbind(1)
    return (high << BITS | low).tolist()


def _outline(entity: Any, row: int) -> list[Circle | Line]:
    x, y = entity.state.pos[row].tolist()
    (angle,) = entity.state.rot[row].tolist()
    color, shape = tuple(entity.color[:3]), entity.shape
    if hasattr(shape, "radius"):
        label = entity.name if hasattr(entity, "action") else ""
        return [Circle(x, y, shape.radius, color, label, bool(entity.collide))]
    long, wide = shape.length / 2, 0.0 if type(shape).__name__ == "Line" else shape.width / 2
    ends = [(long, wide), (-long, wide), (-long, -wide), (long, -wide)] if wide else [(long, 0.0), (-long, 0.0)]
    turn, swing = math.cos(angle), math.sin(angle)
    at = [(x + a * turn - b * swing, y + a * swing + b * turn) for a, b in ends]
    pairs = zip(at, at[1:] + at[:1], strict=True) if wide else [(at[0], at[1])]
    return [Line(*p, *q, 0.02, color) for p, q in pairs]


# --- everything that VMAS knows --------------------------------------------------------------------------------------

QNetwork = dict[str, Any]  # way -> tensor or number
Links = dict[str, str]  # way -> the way by which the same thing was found first


def _roots(inner: Any) -> list[Any]:
    """Where ways begin: at the bodies, for scenarios point now at one of them and now at another."""
    return [*inner.world.agents, *inner.world.landmarks, inner.world, inner.scenario, inner]


def _read(inner: Any) -> tuple[QNetwork, Links]:
    """A copy of every tensor and number that can be reached; and what leads to a thing that was found before."""
    values: QNetwork = {}
    links: Links = {}
    roots = _roots(inner)
    queue = [(f"/{i}", x) for i, x in enumerate(roots)]
    found = {id(x): way for way, x in queue}
    while queue:
        above, thing = queue.pop(0)
        for key, x in _inside(thing):
            way = f"{above}/{key}"
            if x is None or isinstance(x, bool | int | float | str):
                values[way] = x
            elif id(x) in found:
                links[way] = found[id(x)]
            elif isinstance(x, Tensor):
                values[way] = x.detach().clone()
                found[id(x)] = way
            elif _inside(x):
                queue.append((way, x))
                found[id(x)] = way
    return values, links


def _write(inner: Any, values: QNetwork, links: Links, device: torch.device) -> None:
    """Put what `_read` gave into another environment that was made alike."""
    roots = _roots(inner)
    for way, first in links.items():
        if first not in values:
            _put(roots, way, _at(roots, first))
    fresh = {way: x.to(device).clone() if isinstance(x, Tensor) else x for way, x in values.items()}
    for way, x in [*fresh.items(), *((way, fresh[first]) for way, first in links.items() if first in fresh)]:
        _put(roots, way, x)


def _at(roots: Any, way: str) -> Any:
    for key in way.split("/")[1:]:
        roots = dict(_inside(roots))[key]
    return roots


def _put(roots: Any, way: str, x: Any) -> None:
    above, _, last = way.rpartition("/")
    holder = _at(roots, above)
    if isinstance(holder, dict):
        holder[list(holder)[int(last)]] = x
    elif isinstance(holder, list):
        holder[int(last)] = x
    elif not isinstance(holder, tuple):
        vars(holder)[last] = x
    elif isinstance(x, Tensor):
        holder[int(last)].copy_(x)


def _inside(thing: Any) -> list[tuple[str, Any]]:
    """What a list, a dict or an object of VMAS's is made of; a scenario's module has no name, and may use distributions."""
    if isinstance(thing, dict):
        return [(str(i), x) for i, x in enumerate(thing.values())]
    if isinstance(thing, list | tuple):
        return [(str(i), x) for i, x in enumerate(thing)]
    mine = type(thing).__module__
    known = mine == "" or mine.startswith(("vmas.", "torch.distributions."))
    return list(vars(thing).items()) if known and hasattr(thing, "__dict__") else []
