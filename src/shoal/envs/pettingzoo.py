"""PettingZoo's environments: agents that move at once, or in turn.

    shoal train mappo pettingzoo/sisl.multiwalker_v9 --env.args n_walkers=2,shared_reward=false

The id is a module of the package, `family.name_vN`. Its `parallel_env` is taken where there is one, else its `env`, in which
agents move in turn (`turns` says otherwise). Settings of the environment's own are `args`. Pictures can be made `grey`, smaller
(`resize`) and several of them be seen at once (`stack`).

**Groups and teams** are made of names and spaces, or of `--regroup` and `teams` (`grouping.py`): PettingZoo does not say who
plays together. Nor does it say that agents are paid alike; `common` is your promise that those of a team are, and it is an
error if they are not.

**Lives.** Nor does it say whether agents leave before the episode's end, so that all groups are `mortal` where there is
more than one agent; `mortal` false is a promise that they stay, and it is an error if they do not. An agent is paid for the
steps that it began alive. Its last observation is written in the frame in which it is gone; where it gave none, and before
and after its life, its observation is zeros. An agent that leaves without having terminated was truncated; those who
did not terminate when the episode ends are still there in its last frame, so that critics see them. What is a
termination is the environment's word: multiwalker calls its time limit one.

**Masks** are `action_mask` of an observation (the rest of it is what the agent sees) or of an agent's info. Where a
mask forbids everything, as for those who wait, it is taken to forbid nothing.

**State** is the environment's own, flattened, unless that is a picture; `state` false leaves it out, and critics see all
observations instead. Some have none when everybody is gone (multiwalker): then the one before is the last.

**In turn.** A step of the row is one agent's move. Every agent is paid what it got in that step, so that its pay between two
turns is their sum. All who live see something in each frame. The dead are stepped through in the same step.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from shoal.envs.conversions import MASK, conversion
from shoal.envs.grouping import group_agents, team_of_groups
from shoal.envs.pixels import PixelConfig, Pixels, observer, picture_of
from shoal.envs.rows import Row, Slots
from shoal.envs.spaces import Moves, Observer, allow, kind_of
from shoal.envs.vector import Host, HostConfig
from shoal.flags import arguments
from shoal.ids import near
from shoal.spec import EnvSpec, Group, UserError

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv

FAMILIES = ("atari", "butterfly", "classic", "sisl")
PROBE = 0  # the seed of the reset by which a row finds out what an environment gives


def claims(id: str) -> bool:
    """Whether a bare id looks like one of its modules."""
    return re.fullmatch(rf"({'|'.join(FAMILIES)})\.\w+_v\d+", id) is not None


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """An agent: its group, its place there, and how it sees and moves."""

    group: str
    i: int
    observer: Observer | Pixels
    moves: Moves
    masked: bool  # its observation holds its mask


class ZooRow(Row):
    """What both kinds of rows share: who is in which group, and how a frame is written. `mortal` none: more than one agent."""

    turns: ClassVar[bool]

    def __init__(
        self,
        env: Any,
        groups: str = "",
        teams: str = "",
        mortal: bool | None = None,
        state: bool = True,
        common: bool = False,
        pixels: PixelConfig | None = None,
        limit: int | None = None,
    ):
        self.env, self.limit, self.clock = env, limit, 0
        self.agents = list(getattr(env, "possible_agents", ()))
        if not self.agents:
            raise UserError(f"{env} has no possible_agents: Shoal must know beforehand who may take part.")
        infos = self.probe()
        spaces = {a: env.observation_space(a) for a in self.agents}
        masked = {a: kind_of(s) == "Dict" and MASK in s.spaces for a, s in spaces.items()}
        observers = {a: observer(s, pixels or PixelConfig(), MASK if masked[a] else None) for a, s in spaces.items()}
        moves = {a: Moves(env.action_space(a)) for a in self.agents}
        both = {a: (repr(observers[a].shape), moves[a].space) for a in self.agents}
        members_of = group_agents(groups, self.agents, both)
        team_of = team_of_groups(teams, list(members_of))
        self.mortal = self.turns or (len(self.agents) > 1 if mortal is None else mortal)
        self.members: dict[Any, Member] = {}
        where: dict[Any, Any] = {}  # the masks of those who have some
        made = []
        for name, members in members_of.items():
            first = members[0]
            space = moves[first].space
            hides = space.kind != "continuous" and any(masked[a] or MASK in _of(infos, a) for a in members)
            names = tuple(map(str, members))
            shape = observers[first].shape
            made.append(Group(name, team_of[name], names, shape, space, mortal=self.mortal, masked=hides))
            for i, a in enumerate(members):
                self.members[a] = Member(name, i, observers[a], moves[a], masked[a])
                where[a] = "observation" if masked[a] else "info" if hides else None
        self.conversions = {str(a): conversion(spaces[a], env.action_space(a), where[a], pixels) for a in self.agents}
        self.teams = [[a for a in self.agents if team_of[self.members[a].group] == t] for t in dict.fromkeys(team_of.values())]
        self.promised, alone = common, all(len(team) == 1 for team in self.teams)
        width, horizon = self._width() if state else None, self._horizon()
        self.spec = EnvSpec(tuple(made), width, common=common or alone, turns=self.turns, horizon=horizon)
        self.images = np.float32 if any(o.images is np.float32 for o in observers.values()) else np.uint8
        self.notes = tuple(dict.fromkeys(m.note for m in moves.values() if m.note))
        self.living: list[Any] = []
        self._known = np.zeros(self.spec.state or 0, np.float32)

    @abstractmethod
    def probe(self) -> Mapping[Any, Any]:
        """Reset once, to see what it gives: the agents' infos."""

    def present(self) -> list[Any]:
        """Who is in the game now, dead or not."""
        here = list(self.env.agents)
        for a in here:
            if a not in self.members:
                raise UserError(f"an agent {a!r} came into {self.env} which is not among its possible_agents.")
        return here

    def begun(self, seen: Mapping[Any, Any], infos: Any, out: Slots, active: Collection[Any]) -> None:
        self.living, self.clock = self.present(), 0
        self._write(seen, infos, out, self.living, active, self.living)

    def moved(self, seen: Mapping[Any, Any], infos: Any, out: Slots, gone: Collection[Any], ended: Collection[Any]) -> bool:
        """After a step: what each saw, who of those present is out, and who ended by terminating. True: it is over."""
        before, self.living = self.living, [a for a in self.present() if a not in gone]
        self.clock += 1
        over = not self.living or self.clock == self.limit
        if not self.mortal and not over and len(self.living) < len(self.agents):
            raise UserError(
                f"{next(a for a in self.agents if a not in self.living)!r} left {self.env} early: set --env.mortal true."
            )
        for a in ended:
            if a in before:
                out.terminated[self.members[a].group][self.members[a].i] = True
        there = [a for a in before if a not in ended] if over else self.living
        self._write(seen, infos, out, there, self.to_move(there, over), [a for a in self.living if a not in before])
        return over

    def to_move(self, there: list[Any], over: bool) -> Collection[Any]:
        return there

    def pay(self, out: Slots, rewards: Mapping[Any, Any]) -> None:
        """Those who began the step alive; who is not mentioned gets nothing."""
        for a in self.living:
            member = self.members[a]
            out.reward[member.group][member.i] += rewards.get(a, 0.0)
        for team in self.teams if self.promised else ():
            if len({float(rewards.get(a, 0.0)) for a in team if a in self.living}) > 1:
                raise UserError(
                    f"{' and '.join(map(str, team))} of {self.env} are not always paid alike: set --env.common false."
                )

    def picture(self) -> np.ndarray | None:
        return picture_of(self.env)

    def close(self) -> None:
        self.env.close()

    def _write(
        self,
        seen: Mapping[Any, Any],
        infos: Any,
        out: Slots,
        alive: Collection[Any],
        active: Collection[Any],
        start: Collection[Any],
    ) -> None:
        for a, member in self.members.items():
            g, i, obs = member.group, member.i, seen.get(a)
            place = {k: x[i] for k, x in out.obs[g].items()} if isinstance(out.obs[g], dict) else out.obs[g][i]
            if obs is not None:
                member.observer.write(obs, place, a in start)
            else:
                for x in place.values() if isinstance(place, dict) else (place,):
                    x.fill(0)
            if g in out.alive:
                out.alive[g][i], out.active[g][i], out.start[g][i] = a in alive, a in active, a in start
            if g in out.legal:
                mask = obs[MASK] if member.masked and obs is not None else _of(infos, a).get(MASK)
                allow(mask if a in active else None, member.moves.space, out.legal[g][i])
        if out.state is not None:
            out.state[...] = self._known = self._state(out.state.size)

    def _state(self, size: int) -> np.ndarray:
        try:
            now = np.ravel(self.env.state())
        except Exception as e:  # what it speaks of may be gone
            if self.living:
                raise UserError(
                    f"{self.env} has no state after a while ({type(e).__name__}: {e}): set --env.state false."
                ) from e
            return self._known
        if now.size != size:
            raise UserError(f"the state of {self.env} has {now.size} numbers and began with {size}: set --env.state false.")
        return now

    def _width(self) -> int | None:
        """The size of the environment's own state, where it has one and it is no picture."""
        try:
            now = np.asarray(self.env.state())
        except (NotImplementedError, AttributeError, TypeError):  # the ways in which environments have none
            return None
        return None if now.dtype == np.uint8 or now.dtype == object else now.size

    def _horizon(self) -> int | None:
        """Cycles, where it says how many; in turn, that many moves of each. Or as many steps as we let it have."""
        if self.limit is not None:
            return self.limit
        inner = getattr(self.env, "unwrapped", self.env)
        for place in (inner, getattr(inner, "env", None)):
            cycles = getattr(place, "max_cycles", None)
            if isinstance(cycles, int) and cycles > 0:
                return cycles * (len(self.agents) if self.turns else 1)
        return None


class ParallelRow(ZooRow):
    """All agents move at once."""

    turns = False
    env: ParallelEnv[Any, Any, Any]

    def probe(self) -> Mapping[Any, Any]:
        return self.env.reset(seed=PROBE)[1]

    def reset(self, seed: int, out: Slots) -> None:
        seen, infos = self.env.reset(seed=seed)
        self.begun(seen, infos, out, self.present())

    def step(self, actions: dict[str, np.ndarray], out: Slots) -> bool:
        acting = {a: self.members[a] for a in self.env.agents}
        moves = {a: m.moves.read(actions[m.group][m.i]) for a, m in acting.items()}
        seen, rewards, terminated, truncated, infos = self.env.step(moves)
        self.pay(out, rewards)
        gone = [a for a in self.agents if terminated.get(a) or truncated.get(a)]
        return self.moved(seen, infos, out, gone, [a for a in gone if terminated.get(a)])


class AECRow(ZooRow):
    """Agents move in turn."""

    turns = True
    env: AECEnv[Any, Any, Any]

    def probe(self) -> Mapping[Any, Any]:
        self.env.reset(seed=PROBE)
        return self.env.infos

    def reset(self, seed: int, out: Slots) -> None:
        self.env.reset(seed=seed)
        seen = {a: self.env.observe(a) for a in self.present()}
        self.begun(seen, self.env.infos, out, [self.env.agent_selection])

    def step(self, actions: dict[str, np.ndarray], out: Slots) -> bool:
        env, member = self.env, self.members[self.env.agent_selection]
        env.step(member.moves.read(actions[member.group][member.i]))
        self.pay(out, env.rewards)
        gone, ended, seen, infos = [], [], {}, {}
        for _ in range(len(self.agents) + 1):
            for a in [a for a in env.agents if a not in gone and (env.terminations[a] or env.truncations[a])]:
                gone.append(a)
                ended += [a] if env.terminations[a] else []
                seen[a], infos[a] = env.observe(a), env.infos.get(a)
            if env.agent_selection not in gone or not env.agents:
                break
            env.step(None)
            self.pay(out, env.rewards)
        else:
            raise UserError(f"the dead of {env} do not leave when they are stepped with None.")
        for a in env.agents:
            if a not in gone:
                seen[a], infos[a] = env.observe(a), env.infos.get(a)
        return self.moved(seen, infos, out, gone, ended)

    def to_move(self, there: list[Any], over: bool) -> Collection[Any]:
        return () if over else (self.env.agent_selection,)


def row_of(env: Any, **settings: Any) -> ZooRow:
    """The row of an environment that somebody made, of either kind; `settings` are those of a `ZooRow`."""
    return (AECRow if hasattr(env, "agent_iter") else ParallelRow)(env, **settings)


def row_with_config(env: Any, config: Any) -> ZooRow:
    """The same with the settings of a Config."""
    c, mortal = config, None if config.mortal == "auto" else config.mortal
    return row_of(env, groups=c.groups, teams=c.teams, mortal=mortal, state=c.state, common=c.common, pixels=c, limit=c.horizon)


def _of(infos: Any, agent: Any) -> Mapping[str, Any]:
    return (infos or {}).get(agent) or {}


# --- the adapter -----------------------------------------------------------------------------------------------------


class PettingZoo(Host):
    package: ClassVar[str] = "pettingzoo"
    rest: ClassVar[str] = "FAMILY.NAME_vN"

    @dataclass(frozen=True)
    class Config(PixelConfig, HostConfig):
        id: str = ""  # the environment: a module of the package, such as sisl.multiwalker_v9
        args: str = ""  # settings of the environment's own: name=value,name=value
        groups: str = field(default="", metadata={"flag": False})  # what --regroup says
        teams: str = ""  # which groups win together: name=group+group, or all; those not named are teams of their own
        turns: Literal["auto"] | bool = "auto"  # agents move in turn; auto: only where they cannot move at once
        mortal: Literal["auto"] | bool = "auto"  # agents may leave before the end; auto: where there is more than one
        common: bool = False  # the agents of a team are always paid alike
        state: bool = True  # take the environment's own state, where it has one
        horizon: int | None = None  # steps after which an episode is cut off; none: the environment's own

        def __post_init__(self) -> None:
            HostConfig.__post_init__(self)
            PixelConfig.__post_init__(self)
            if self.horizon is not None and self.horizon < 1:
                raise UserError(f"--env.horizon is {self.horizon}: it must be at least 1.")

    @classmethod
    def row(cls, config: Any, drawn: bool = False) -> Row:
        return row_with_config(cls.make(config, drawn), config)

    @classmethod
    def make(cls, config: Any, drawn: bool) -> Any:
        """The library's environment."""
        module, names = cls.module(config.id), ["env", "parallel_env"]
        if config.turns is not True and hasattr(module, "parallel_env"):
            names.remove("env")
        elif config.turns is False:
            raise UserError(f"--env.turns is false, and the agents of {config.id} can only move in turn.")
        return made(getattr(module, names[0]), config, drawn, getattr(module, "raw_env", None))

    @classmethod
    def module(cls, id: str) -> Any:
        known = modules(cls.package)
        if id not in known:
            raise UserError(f"{cls.package} has no {id!r}{near(id, known) or '; it has ' + ', '.join(known)}.")
        return imported(f"{cls.package}.{id}")


@cache
def modules(package: str) -> tuple[str, ...]:
    """A package's environments, `family.name_vN` or `name_vN`, from the names of its files."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{package} is not installed: pip install {package}.")
    root = Path(spec.submodule_search_locations[0])
    files = (p.relative_to(root) for p in sorted(root.rglob("*_v*.py")))
    return tuple(".".join(f.with_suffix("").parts) for f in files if len(f.parts) <= 2 and re.search(r"_v\d+\.py$", f.name))


def imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise UserError(f"{module} needs {e.name}, which is not installed: pip install {e.name}.") from e
    except Exception as e:  # whatever a library does when it is loaded
        raise UserError(f"{module} could not be loaded: {type(e).__name__}: {e}.") from e


def made(make: Any, config: Any, drawn: bool, inside: Any = None, **given: Any) -> Any:
    """What the library's function `make` gives for the user's `args` and what else is `given`. `inside` is what reads them."""
    args = {**given, **({"render_mode": "rgb_array"} if drawn else {}), **arguments(config.args, "--env.args")}
    try:
        return make(**args)
    except Exception as e:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(e)) if isinstance(e, TypeError) else None
        if unknown is None:
            raise UserError(f"{config.id} could not be made: {type(e).__name__}: {e}.") from e
        names = [n for n in inspect.signature(inside or make).parameters if n not in ("args", "kwargs", *given)]
        has = f"; it has {', '.join(names)}" if names else ""
        raise UserError(
            f"--env.args has {unknown[1]!r}, which {config.id} does not know{near(unknown[1], names) or has}."
        ) from e
