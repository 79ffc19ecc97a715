"""Gymnasium: any environment of one agent by its id, `gymnasium/LunarLander-v3`, or by the bare id where nobody else has it.

What it sees and does is taken as it is (`spaces.py` says how): vectors, images, both; choices, several at once, numbers.
Pictures can be made grey, smaller and stacked, and an action held for several frames (`--env.skip`), whose rewards add up. A
legal mask that an environment puts into `info["action_mask"]`, or as `action_mask` into a Dict that it shows, is used. The
environment's own settings are `--env.args`:

    shoal train ppo gymnasium/CarRacing-v3 --env.args continuous=false --env.grey --env.resize 64 --env.stack 4 --env.skip 4

Environments that hold several agents in tuples, as `lbforaging` and `rware` do, come out as a group of agents. The five
classic tasks have versions in tensors, `CartPole-v1` and so on without `gymnasium/` before, which are the same and much faster.
Old names of Gymnasium's are understood, and the run says which version it is.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shoal.envs.conversions import MASK, conversion
from shoal.envs.pixels import PixelConfig, observer, picture_of
from shoal.envs.rows import Row, Slots
from shoal.envs.spaces import Moves, allow, kind_of
from shoal.envs.vector import Host, HostConfig
from shoal.flags import arguments
from shoal.ids import near
from shoal.spec import EnvSpec, Group, UserError

GROUP = "agents"


@dataclass(frozen=True)
class GymConfig(PixelConfig, HostConfig):
    skip: int = 1  # frames that an action is held for
    horizon: int | None = None  # frames after which an episode is cut off; none: the environment's own
    args: str = ""  # settings of the environment's own: name=value,name=value

    def __post_init__(self) -> None:
        HostConfig.__post_init__(self)
        PixelConfig.__post_init__(self)
        for name in ("skip", "horizon"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"--env.{name} is {value}: it must be at least 1.")


class GymRow(Row):
    """An environment of one agent."""

    def __init__(self, env: Any, config: GymConfig):
        self.env, self.skip = env, config.skip
        self.moves, space = Moves(env.action_space), env.observation_space
        chooses = self.moves.space.kind != "continuous"
        self.inside = chooses and kind_of(space) == "Dict" and MASK in space.spaces  # its observation holds its mask
        self.observer = observer(space, config, MASK if self.inside else None)
        self.images = self.observer.images
        self.notes = (self.moves.note,) if self.moves.note else ()
        _, info = env.reset(seed=0)
        masked = chooses and (self.inside or MASK in info)
        group = Group(GROUP, GROUP, ("agent_0",), self.observer.shape, self.moves.space, masked=masked)
        where = "observation" if self.inside else "info" if masked else None
        self.conversions = {"agent_0": conversion(env.observation_space, env.action_space, where, config, config.skip)}
        self.spec = EnvSpec((group,), common=True, horizon=horizon_of(env, config))

    def reset(self, seed: int, out: Slots) -> None:
        obs, info = self.env.reset(seed=seed)
        self._see(obs, info, out, first=True)

    def step(self, actions: dict[str, np.ndarray], out: Slots) -> bool:
        action, total = self.moves.read(actions[GROUP][0]), 0.0
        for _ in range(self.skip):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        self._see(obs, info, out)
        out.reward[GROUP][0], out.terminated[GROUP][0] = total, terminated
        return bool(terminated or truncated)

    def _see(self, obs: Any, info: dict[str, Any], out: Slots, first: bool = False) -> None:
        seen = out.obs[GROUP]
        place = {k: x[0] for k, x in seen.items()} if isinstance(seen, dict) else seen[0]
        self.observer.write(obs, place, first)
        if out.legal:
            allow((obs if self.inside else info).get(MASK), self.moves.space, out.legal[GROUP][0])

    def picture(self) -> np.ndarray | None:
        return picture_of(self.env)

    def close(self) -> None:
        self.env.close()


class TupleRow(Row):
    """An environment whose observations, actions and rewards are those of several agents, in order."""

    def __init__(self, env: Any, config: GymConfig):
        self.env, self.skip, spaces = env, config.skip, env.action_space.spaces
        self.moves = [Moves(s) for s in spaces]
        self.observers = [observer(s, config) for s in env.observation_space.spaces]
        kinds = list(dict.fromkeys((m.space, str(o.shape)) for m, o in zip(self.moves, self.observers, strict=True)))
        kind = [kinds.index((m.space, str(o.shape))) for m, o in zip(self.moves, self.observers, strict=True)]
        names = [GROUP] if len(kinds) == 1 else [f"agents_{k}" for k in range(len(kinds))]
        self.place = [(names[k], kind[:i].count(k)) for i, k in enumerate(kind)]
        self.images = self.observers[0].images
        pairs = zip(env.observation_space.spaces, spaces, strict=True)
        self.conversions = {f"agent_{i}": conversion(*pair, None, config, config.skip) for i, pair in enumerate(pairs)}
        members = {name: [i for i, (g, _) in enumerate(self.place) if g == name] for name in names}
        groups = tuple(
            Group(g, GROUP, tuple(f"agent_{i}" for i in at), self.observers[at[0]].shape, self.moves[at[0]].space)
            for g, at in members.items()
        )
        self.spec = EnvSpec(groups, horizon=horizon_of(env, config))

    def reset(self, seed: int, out: Slots) -> None:
        self._see(self.env.reset(seed=seed)[0], out, first=True)

    def step(self, actions: dict[str, np.ndarray], out: Slots) -> bool:
        taken = tuple(m.read(actions[g][k]) for m, (g, k) in zip(self.moves, self.place, strict=True))
        total = np.zeros(len(self.place))
        for _ in range(self.skip):
            obs, rewards, ended, truncated, _ = self.env.step(taken)
            total += rewards
            over = bool(np.all(ended) or np.any(truncated))
            if over:
                break
        self._see(obs, out)
        terminated = np.broadcast_to(over and self.terminated(ended), len(self.place))
        for i, (g, k) in enumerate(self.place):
            out.reward[g][k], out.terminated[g][k] = total[i], terminated[i]
        return over

    def terminated(self, ended: Any) -> Any:
        """Whether what the environment calls an end is one, and not its limit of time."""
        return ended

    def _see(self, obs: Any, out: Slots, first: bool = False) -> None:
        for x, o, (g, k) in zip(obs, self.observers, self.place, strict=True):
            seen = out.obs[g]
            o.write(x, {n: part[k] for n, part in seen.items()} if isinstance(seen, dict) else seen[k], first)

    def picture(self) -> np.ndarray | None:
        return picture_of(self.env)

    def close(self) -> None:
        self.env.close()


def horizon_of(env: Any, config: GymConfig) -> int | None:
    """Steps that an episode has at most, where that is known."""
    inner, spec = getattr(env, "unwrapped", env), getattr(env, "spec", None)
    names = ("_max_episode_steps", "max_steps")
    known = [getattr(spec, "max_episode_steps", None), *(getattr(inner, name, None) for name in names)]
    frames = config.horizon or next((n for n in known if isinstance(n, int) and n > 0), None)
    return -(-int(frames) // config.skip) if frames else None


def row_of(env: Any, config: GymConfig, several_as: type[TupleRow] = TupleRow) -> Row:
    spaces = kind_of(env.action_space), kind_of(env.observation_space)
    several = spaces == ("Tuple", "Tuple") and len(env.action_space.spaces) == getattr(env.unwrapped, "n_agents", 0)
    return several_as(env, config) if several else GymRow(env, config)


class Gymnasium(Host):
    rest: ClassVar[str] = "ID"
    library: ClassVar[str] = "gymnasium"  # what registers the ids
    several_as: ClassVar[type[TupleRow]] = TupleRow
    renamed: ClassVar[dict[str, str]] = {
        "Pendulum-v0": "Pendulum-v1",
        "LunarLander-v2": "LunarLander-v3",
        "LunarLanderContinuous-v2": "LunarLanderContinuous-v3",
        "BipedalWalker-v2": "BipedalWalker-v3",
        "BipedalWalkerHardcore-v2": "BipedalWalkerHardcore-v3",
        "CarRacing-v0": "CarRacing-v3",
        "CarRacing-v1": "CarRacing-v3",
        "CarRacing-v2": "CarRacing-v3",
        "Acrobot-v0": "Acrobot-v1",
    }

    @dataclass(frozen=True)
    class Config(GymConfig):
        id: str = "CartPole-v1"  # the environment's name

    @classmethod
    def row(cls, config: Any, drawn: bool = False) -> Row:
        gym = library(cls.library)
        kwargs = arguments(config.args, "--env.args")
        if config.horizon is not None:
            kwargs["max_episode_steps"] = config.horizon
        if drawn:
            kwargs["render_mode"] = "rgb_array"
        try:
            env = gym.make(config.id, disable_env_checker=True, **kwargs)
        except gym.error.DependencyNotInstalled as e:
            raise UserError(f"{config.id} needs what is not installed: {_words(e)}.") from None
        except (gym.error.Error, ModuleNotFoundError) as e:
            close = near(config.id, gym.registry)
            raise UserError(f"{cls.library} has no environment {config.id!r}{close}: {_words(e)}.") from None
        except Exception as e:  # whatever its maker does
            given = f" of --env.args {config.args!r}" if config.args else ""
            raise UserError(f"{config.id} could not be made{given}: {type(e).__name__}: {_words(e)}.") from e
        return row_of(env, config, cls.several_as)


def _words(e: Exception) -> str:
    return " ".join(str(e).split()).rstrip(".?")


def limited(env: Any, horizon: int | None) -> Any:
    """An environment that is cut off after so many frames."""
    if horizon is None:
        return env
    from gymnasium.wrappers import TimeLimit

    return TimeLimit(env, horizon)


def library(name: str) -> Any:
    """Gymnasium, with the ids of another library registered."""
    try:
        import gymnasium

        importlib.import_module(name)
    except ImportError as e:
        raise UserError(f"{name} is not installed ({e}): pip install {name}.") from None
    gymnasium.logger.min_level = gymnasium.logger.ERROR  # its advice on versions is ours to give
    return gymnasium


def claims(id: str) -> bool:
    """Whether a bare id is one of Gymnasium's own."""
    try:
        import gymnasium
    except ImportError:
        return False
    spec = gymnasium.registry.get(id)
    return spec is not None and str(spec.entry_point).startswith("gymnasium.")


def names() -> list[str]:
    try:
        import gymnasium
    except ImportError:
        return []
    return list(gymnasium.registry)
