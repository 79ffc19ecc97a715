"""The checks of a raw environment, of Gymnasium's or PettingZoo's kind.

The libraries have checkers of their own: `gymnasium.utils.env_checker.check_env`, `pettingzoo.test.parallel_api_test` and
`api_test`. What they find is a note. They take few steps, stop at the first finding, know nothing of masks in an info, and do
not tell what spoils training from what is unusual. So the checks here are those that they do not make, or not over whole
episodes; each says which.
"""

from __future__ import annotations

import re
import time
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.envs.rows import Row, Slots, arrays
from shoal.envs.spaces import SIMPLE, kind_of
from shoal.tools.contract import BrokenError, During, Findings, Level, form_of
from shoal.tools.raw import MASK, RawEnv, RawStep, chosen, copied, in_bytes
from shoal.training.seeds import generator

REPLAYED = 64  # steps that are played twice
SEEDS = 40  # seeds that two environments begin with
CYCLES = 50  # steps that PettingZoo's checkers take
# in warnings of the libraries that say nothing about whether it can be trained on
UNIMPORTANT = ("infinity", "symmetric and normalized", "unwrapped version", "values are equal", "render")


class RawCheck:
    def __init__(self, env: Any, findings: Findings, during: During):
        self.raw, self.findings, self.during = RawEnv(env, during), findings, during
        self.problem, self.note = findings.problem, findings.note
        self.unchecked: set[str] = set()  # what could not be checked

    def play(self, steps: int, seconds: float) -> None:
        """Whole episodes of legal random actions; the first steps of them twice."""
        raw, draw, began = self.raw, generator(0, "check", "raw"), time.monotonic()
        taken: list[dict[Any, np.ndarray]] = []
        episode, first = 0, raw.reset(0)
        self.check_reset(first)
        digests, before, dead = [first.digest], first, set[Any]()
        for _ in range(steps):
            if time.monotonic() - began > seconds:
                break
            actions = {a: chosen(raw.moves[a].space, raw.mask(a, before), draw) for a in before.active}
            held = {a: (x, copied(x)) for a, x in before.obs.items()}
            now = raw.move(actions)
            taken.append(actions)
            digests.append(now.digest)
            self.check_step(before, now)
            # PettingZoo does not check it, and Gymnasium only since 1.4
            for a, (x, copy) in held.items():
                if a in now.obs and in_bytes(x) != in_bytes(copy):
                    why = "an observation that was handed out is written over by the next step"
                    self.note("arrays", f"{why} (that of {a}): Shoal copies it, other code may not; return a new array.")
            # PettingZoo checks it in its first two episodes, and names no agent
            if back := [a for a in now.there if a in dead]:
                self.problem("lives", f"{back[0]} came back from the dead: who terminated or was truncated stays out.")
            dead |= {a for a in now.terminated if now.terminated[a] or now.truncated.get(a)}
            before = now
            if now.over:
                episode, dead = episode + 1, set()
                before = raw.reset(episode)
                digests.append(before.digest)
                self.check_reset(before)
        self.check_repeatable(taken[:REPLAYED], digests)

    def check_pictures(self) -> None:
        # the libraries ask no environment to have pictures
        if "rgb_array" not in ((getattr(self.raw.env, "metadata", None) or {}).get("render_modes") or ()):
            self.note("pictures", "it has no render mode rgb_array: shoal watch cannot film it.")

    def check_repeatable(self, taken: list[dict[Any, np.ndarray]], digests: list[Any]) -> None:
        """The same seeds and actions again; another seed. Gymnasium compares one step, and first observations only of what was
        registered; PettingZoo has a test of its own for it (`seed_test`), which wants two environments."""
        raw, again, episode = self.raw, iter(digests), 0
        self.unchecked |= {"repeatable"}
        if raw.reset(0).digest != next(again):
            why = "the same seed gives another first observation each time"
            self.problem("seeding", f"{why}: draw from a generator that reset seeds (super().reset(seed=seed)).")
            return
        self.unchecked -= {"repeatable"}
        for t, actions in enumerate(taken, 1):
            now = raw.move(actions)
            same = now.digest == next(again)
            if now.over and same:
                episode += 1
                same = raw.reset(episode).digest == next(again)
            if not same:
                why = f"the same seed and actions led elsewhere at step {t}"
                what = "draw from a generator that reset seeds, and let reset put everything back"
                self.problem("repeatable", f"{why}: {what}; else a run cannot be resumed as it was.")
                return
        if len({raw.reset(seed).digest for seed in range(5)}) == 1:
            self.note("starts", "five seeds gave one and the same first observation: it always begins alike.")

    def check_fresh_row(self, row: Row, other: Row, seconds: float) -> None:
        """Two rows that were reset to different seeds before: that must not matter. No library checks it."""
        one, two, began = FirstObservation(row), FirstObservation(other), time.monotonic()
        for seed in range(SEEDS):
            if time.monotonic() - began > seconds:
                return
            with self.during("reset", times=4):
                one(seed + SEEDS)
                two(seed + 2 * SEEDS)
                same = one(seed) == two(seed)
            if not same:
                why = f"what was played before changes how seed {seed} begins"
                self.problem("seeding", f"{why}: let reset put everything back; else a run cannot be resumed as it was.")
                return

    def check_with_library(self, env: Any) -> None:
        """What the library's own checker says of another environment made like this one (it may change it), unless we found
        worse already."""
        first = self.raw.reset(0)
        masked = not self.raw.in_turn and any(MASK in (first.infos.get(a) or ()) for a in first.active)  # it knows none there
        if env is None or masked or any(f.level == "problem" for f in self.findings.found.values()):
            return
        library = "PettingZoo" if self.raw.by_name else "Gymnasium"
        with self.during(f"the checker of {library}", times=5):
            said = library_says(env)
        if said:
            self.note(library.lower(), f"{library}'s own checker says: {said}")

    # --- one reset or step ---

    def check_reset(self, now: RawStep) -> None:
        self.check_observations(now)
        for a in now.there:
            if a not in now.obs:  # PettingZoo's says it without a word: `assert set(...).issubset(...)`
                self.problem("observations", f"reset gave {a} no observation: give one to all in env.agents.")

    def check_step(self, before: RawStep, now: RawStep) -> None:
        self.check_observations(now)
        for a in before.there:
            self.check_ending(a, now)
            self.check_reward(a, now)

    def check_observations(self, now: RawStep) -> None:
        """Observations in their spaces, and masks."""
        for a in (*now.obs, *now.there):
            if a not in self.raw.names:  # PettingZoo's checks it too; but without the name's spaces there is no next step
                raise BrokenError("agents", f"{a!r} is not among the possible_agents: name everyone who may come.")
        for a, x in now.obs.items():
            # the libraries say that an observation is not in its space, and not why; those of parallel environments they skip
            if (wrong := misfit(x, self.raw.spaces[a], f"the observation of {a}")) is not None:
                self.findings.add(*wrong)
        for a in now.active:  # no library checks masks
            mask, sizes = self.raw.mask(a, now), getattr(self.raw.moves[a].space, "sizes", None)
            if mask is None or sizes is None:
                continue
            if mask.size != sum(sizes):
                text = f"the action mask of {a} has {mask.size} entries and the agent {sum(sizes)} choices: make them as many."
                raise BrokenError("masks", text)
            if not all(x.any() for x in np.split(mask, np.cumsum(sizes)[:-1])):
                self.problem("masks", f"the action mask of {a} forbids everything: allow at least one choice.")

    def check_reward(self, a: Any, now: RawStep) -> None:
        """Gymnasium warns of it in the first step. PettingZoo warns that one is missing, not whose, and takes what is not
        finite."""
        if a not in now.rewards:
            text = f"the reward of {a} is missing in a step that it began alive"
            self.problem("rewards", f"{text}: pay everyone who was there before the step, above all in the last one.")
            return
        reward = now.rewards[a]
        if not isinstance(reward, int | float | np.number | np.ndarray) or np.size(reward) != 1:
            kind = type(reward).__name__
            raise BrokenError("rewards", f"the reward of {a} is {reward!r:.40} ({kind}): it must be a number.")
        if not np.isfinite(reward):
            self.problem("finite", f"a reward of {a} is {float(reward)}: rewards must be finite.")

    def check_ending(self, a: Any, now: RawStep) -> None:
        """Flags and last observation of one that was there before the step. The libraries do not ask for a last observation;
        where a flag is missing PettingZoo's raises a KeyError, and of one who leaves without a flag it prints two sets."""
        for name, flags in (("terminated", now.terminated), ("truncated", now.truncated)):
            if a not in flags:
                self.problem("flags", f"{name} does not mention {a}, who was there before the step: say true or false.")
            elif self.raw.by_name and not self.raw.in_turn and not isinstance(flags[a], bool | np.bool_):
                kind = type(flags[a]).__name__  # of parallel environments: the other checkers see to it
                self.note("flags", f"{name} is {flags[a]!r:.40} ({kind}) for {a}: make it True or False.")
        ended, cut = bool(now.terminated.get(a)), bool(now.truncated.get(a))
        if ended and cut:
            self.note("both", f"terminated and truncated were both true for {a}: Shoal takes it for terminated.")
        if a not in now.obs and not ended:
            text = f"{a} was truncated without a last observation" if cut else f"{a} has no observation although it goes on"
            self.problem("observations", f"{text}: give it one, its value is reckoned from there.")
        if a not in now.there and not ended and not cut:
            self.problem("lives", f"{a} left without having terminated or been truncated: set one of the two.")


class FirstObservation:
    """What a row of Shoal's begins with, by seed."""

    def __init__(self, row: Row):
        self.row, self.whole = row, arrays(row, 1)
        self.out = Slots(row.spec, self.whole, 0, "new")

    def __call__(self, seed: int) -> list[bytes]:
        self.row.reset(seed, self.out)
        return [x.tobytes() for x in self.whole.values()]


def library_says(env: Any) -> str:
    """The first complaint of Gymnasium's or PettingZoo's checker, or nothing."""
    said = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if hasattr(env, "agent_iter"):
                from pettingzoo.test import api_test

                api_test(env, num_cycles=CYCLES)
            elif hasattr(env, "possible_agents"):
                from pettingzoo.test import parallel_api_test

                parallel_api_test(env, num_cycles=CYCLES)
            elif kind_of(env.action_space) != "Tuple":  # of several agents in one: Gymnasium knows no such thing
                import gymnasium
                from gymnasium.utils.env_checker import check_env

                gymnasium.logger.min_level = gymnasium.logger.WARN  # the adapter silences it
                check_env(env, skip_render_check=True, skip_close_check=True)
        except Exception as e:
            line = traceback.extract_tb(e.__traceback__)[-1].line or ""
            said = str(e).partition("\n")[0] or line.strip()  # many of PettingZoo's assertions have no words
    texts = [said, *(re.sub(r"\x1b\[\d+m|WARN: ", "", str(w.message)) for w in caught if w.category is not DeprecationWarning)]
    return next((" ".join(t.split()) for t in texts if t and not any(word in t for word in UNIMPORTANT)), "")


def misfit(x: Any, space: Any, what: str) -> tuple[Level, str, str] | None:
    """How an observation is not of its space: level, what about, sentence."""
    kind = kind_of(space)
    if kind in ("Dict", "Tuple"):
        inner = dict(space.spaces) if kind == "Dict" else dict(enumerate(space.spaces))
        given = dict(x) if isinstance(x, Mapping) else dict(enumerate(x)) if isinstance(x, tuple | list) else {}
        if set(given) != set(inner):
            has = ", ".join(map(str, given)) or form_of(x)
            return (
                "problem",
                "observations",
                f"{what} is {has} where its space has {', '.join(map(str, inner))}: make them alike.",
            )
        return next((w for k, s in inner.items() if (w := misfit(given[k], s, f"{what}, part {k},"))), None)
    if kind not in SIMPLE:
        return None
    try:
        a = np.asarray(x)
    except ValueError:
        a = np.empty(0, object)
    if a.dtype.kind not in "biuf":
        return "problem", "observations", f"{what} is {form_of(x)}, which is not made of numbers: return an array."
    if a.shape != tuple(space.shape):
        return "problem", "observations", f"{what} has shape {a.shape} and its space {tuple(space.shape)}: make them alike."
    if not np.isfinite(a).all():
        return "problem", "finite", f"{what} has {_first(a, ~np.isfinite(a))} in it: observations must be finite."
    low, high = _bounds(space)
    slack = 1e-6 * (1 + np.abs(a)) if a.dtype.kind == "f" else 0
    outside = (a < low - slack) | (a > high + slack)
    if outside.any():
        span = f"{_first(low + 0 * a, outside)} to {_first(high + 0 * a, outside)}"
        value = _first(a, outside)
        return "problem", "observations", f"{what} has {value} in it where its space says {span}: widen the space or clip."
    if kind != "Discrete" and a.dtype != space.dtype:
        fine = np.can_cast(a.dtype, space.dtype, "same_kind")
        text = f"{what} is {a.dtype} where its space says {space.dtype}"
        rest = "Shoal converts it; make them alike." if fine else "numbers are lost when it is converted; make them alike."
        return "note" if fine else "problem", "dtypes", f"{text}: {rest}"
    return None


def _bounds(space: Any) -> tuple[Any, Any]:
    kind = kind_of(space)
    if kind == "Box":
        return space.low, space.high
    start = getattr(space, "start", 0)
    return (0, 1) if kind == "MultiBinary" else (start, start + (space.n if kind == "Discrete" else space.nvec) - 1)


def _first(a: Any, where: np.ndarray) -> str:
    return f"{np.asarray(a)[where].flat[0]:.6g}"
