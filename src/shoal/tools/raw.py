"""A raw environment of Gymnasium's or PettingZoo's kind stepped alike whatever its kind: everything by agent."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from shoal.envs.spaces import Moves, kind_of
from shoal.spec import Box, Space
from shoal.tools.contract import BrokenError, During, form_of

MASK = "action_mask"


@dataclass
class RawStep:
    """What a reset or a step returned."""

    obs: dict[Any, Any]
    infos: Mapping[Any, Any]
    there: list[Any]  # who is in the game now
    active: list[Any]  # who is to move
    rewards: Mapping[Any, Any] = field(default_factory=dict)
    terminated: Mapping[Any, Any] = field(default_factory=dict)
    truncated: Mapping[Any, Any] = field(default_factory=dict)
    over: bool = False

    def __post_init__(self) -> None:
        whole = in_bytes(self.obs), repr((self.rewards, self.terminated, self.truncated, self.there))
        self.digest = hashlib.sha1(repr(whole).encode()).hexdigest()


class RawEnv:
    def __init__(self, env: Any, during: During):
        self.env, self.during = env, during
        self.in_turn, self.by_name = hasattr(env, "agent_iter"), hasattr(env, "possible_agents")
        with during("giving its spaces"):
            if self.by_name:
                self.names = list(env.possible_agents)
                self.spaces = {a: env.observation_space(a) for a in self.names}
                actions = {a: env.action_space(a) for a in self.names}
            else:
                both = env.observation_space, env.action_space
                inner = getattr(env, "unwrapped", env)
                self.tuples = all(kind_of(s) == "Tuple" and len(s.spaces) == getattr(inner, "n_agents", 0) for s in both)
                spaces = [tuple(s.spaces) if self.tuples else (s,) for s in both]
                self.names = [f"agent_{i}" for i in range(len(spaces[0]))]
                self.spaces, actions = (dict(zip(self.names, s, strict=True)) for s in spaces)
            self.moves = {a: Moves(s) for a, s in actions.items()}

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self.during(name):
            return getattr(self.env, name)(*args, **kwargs)

    def reset(self, seed: int) -> RawStep:
        answer = self.call("reset", seed=seed)
        if self.in_turn:
            return self._observed_in_turn([])
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise BrokenError("form", f"reset returned {form_of(answer)}: it must return two things, observation and info.")
        obs, infos = answer
        if self.by_name:
            self._named("reset", observations=obs, infos=infos)
            return RawStep(dict(obs), infos, list(self.env.agents), list(self.env.agents))
        return RawStep(self._each(obs), {self.names[0]: infos}, self.names, self.names)

    def move(self, actions: dict[Any, np.ndarray]) -> RawStep:
        moves = {a: self.moves[a].read(x) for a, x in actions.items()}
        if self.in_turn:
            return self._step_in_turn(moves)
        taken = moves if self.by_name else tuple(moves.values()) if self.tuples else moves[self.names[0]]
        answer = self.call("step", taken)
        if not isinstance(answer, tuple) or len(answer) != 5:
            text = f"step returned {form_of(answer)}: it must return five things"
            raise BrokenError("form", f"{text}, observation, reward, terminated, truncated and info.")
        obs, rewards, terminated, truncated, infos = answer
        if self.by_name:
            self._named("step", observations=obs, rewards=rewards, terminations=terminated, truncations=truncated)
            there = [a for a in self.env.agents if not terminated.get(a) and not truncated.get(a)]
            return RawStep(dict(obs), infos, there, there, rewards, terminated, truncated, not there)
        over = bool(np.all(terminated) or np.any(truncated))
        each = [self._each(x) if self.tuples and np.ndim(x) else dict.fromkeys(self.names, x) for x in answer[1:4]]
        rewards, terminated, truncated = each
        there = [] if over else self.names
        return RawStep(self._each(obs), {self.names[0]: infos}, there, there, rewards, terminated, truncated, over)

    def _each(self, x: Any) -> dict[Any, Any]:
        if not self.tuples:
            return {self.names[0]: x}
        if len(x) != len(self.names):
            raise BrokenError("form", f"it returned {len(x)} things for {len(self.names)} agents: one each.")
        return dict(zip(self.names, x, strict=True))

    def _named(self, call: str, **given: Any) -> None:
        for name, x in given.items():
            if not isinstance(x, Mapping):
                raise BrokenError("form", f"the {name} that {call} returned are {form_of(x)}: they must be a dict by agent.")

    def _step_in_turn(self, moves: dict[Any, Any]) -> RawStep:
        """A move, and the leaving of those that it ended."""
        env = self.env
        mover = env.agent_selection
        before = list(env.agents)
        self.call("step", moves[mover])
        rewards, ends, cuts = dict(env.rewards), dict(env.terminations), dict(env.truncations)
        last = {a: self.call("observe", a) for a in env.agents if ends.get(a) or cuts.get(a)}
        for _ in before:
            if not env.agents or not (env.terminations.get(env.agent_selection) or env.truncations.get(env.agent_selection)):
                break
            self.call("step", None)
        else:
            if env.agents:
                raise BrokenError("lives", "the dead do not leave when they are stepped with None: call _was_dead_step.")
        now = self._observed_in_turn([a for a in before if ends.get(a) or cuts.get(a)])
        return replace(now, obs={**last, **now.obs}, rewards=rewards, terminated=ends, truncated=cuts, over=not now.there)

    def _observed_in_turn(self, gone: list[Any]) -> RawStep:
        env = self.env
        there = [a for a in env.agents if a not in gone]
        obs = {a: self.call("observe", a) for a in there}
        return RawStep(obs, env.infos, there, [env.agent_selection] if there else [])

    def mask(self, agent: Any, now: RawStep) -> np.ndarray | None:
        """Choices that are allowed, end to end; none: all."""
        seen, info = now.obs.get(agent), now.infos.get(agent) if isinstance(now.infos, Mapping) else None
        inside = self.by_name and kind_of(self.spaces[agent]) == "Dict" and MASK in self.spaces[agent].spaces
        given = seen[MASK] if inside and isinstance(seen, Mapping) and MASK in seen else (info or {}).get(MASK)
        if given is None:
            return None
        return np.concatenate([np.ravel(m) for m in given] if isinstance(given, tuple | list) else [np.ravel(given)]) != 0


def chosen(space: Space, mask: np.ndarray | None, draw: torch.Generator) -> np.ndarray:
    """A legal action, in the space's own units."""
    if isinstance(space, Box):
        u = torch.rand(len(space.low), generator=draw).numpy()
        return (np.array(space.low) + u * (np.array(space.high) - np.array(space.low))).astype(np.float32)
    chances = torch.ones(sum(space.sizes)) if mask is None else torch.from_numpy(mask).float()
    each = [x if x.any() else torch.ones_like(x) for x in chances.split(space.sizes)]
    picks = [int(torch.multinomial(x, 1, generator=draw)) for x in each]
    return np.array(picks if space.shape else picks[0])


def stranded(e: BaseException | None) -> Any:
    """The raw object, where making a row of it failed: some function on the way held it."""
    while e is not None:
        for frame, _ in traceback.walk_tb(e.__traceback__):
            env = frame.f_locals.get("env")
            if hasattr(env, "reset") and hasattr(env, "step"):
                return env
        e = e.__cause__
    return None


def copied(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {k: copied(v) for k, v in x.items()}
    return [copied(v) for v in x] if isinstance(x, tuple | list) else np.array(x)


def in_bytes(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {k: in_bytes(v) for k, v in x.items()}
    if isinstance(x, tuple | list):
        return [in_bytes(v) for v in x]
    a = np.asarray(x)
    return repr(x) if a.dtype.kind == "O" else a.tobytes()
