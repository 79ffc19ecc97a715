"""Learning in a loop of the user's own: algorithms outside any run, which act on arrays and learn from arrays.

    spec = EnvSpec((Group("agents", "agents", ("cart",), obs=(4,), action=Discrete(2)),), horizon=500)
    learner = shoal.learner("ppo", spec, steps=100_000, seed=0)
    decision = learner.act(obs, memory, start=start)              actions for the world, memory, and what to record of the step
    samples = shoal.samples(learner, arrays)                      of so many steps: `training/arrays.py` says what they are
    metrics = learner.update(samples)

What the loop does round an update (`training/loop.py`) is done here: schedules go by the environment steps that `act` has seen,
uniform numbers are drawn from generators of the `seed`, a step of a row that explores counts as one. What is learnt from is the
`reward` that is handed over: team pay, shaping and scales of rewards are the caller's, and so is a replay's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.algos.base import Replay
from shoal.algos.samples import Samples
from shoal.flags import build
from shoal.ids import id_of
from shoal.ops.distributions import params_of
from shoal.ops.schedules import Now
from shoal.spec import Batch, EnvSpec, Group, UserError
from shoal.training.arrays import Arrays, Extras, batch_of, frame_of
from shoal.training.collect import Players, to_space
from shoal.training.players import make_players, needs_common_pay, rollout_episodes
from shoal.training.seeds import generator, restore_generator
from shoal.training.settings import RunConfig, Settings, choose_device
from shoal.tree import tree_leaves, tree_map

EXPLORING = ("noise", "random")  # parts of memory that exploration alone goes by


class Decision(NamedTuple):
    """What `act` gives, in the form in which observations were given."""

    actions: Any  # for the world, in its own units
    memory: dict[str, Any]  # to be passed in at the next step
    record: dict[str, Any]  # what `shoal.samples` wants to know of this step beside what came of it


class Learner:
    """All who play a world, and of whom some learn. `algorithms`: those."""

    def __init__(self, players: Players, seed: int, steps: int, device: torch.device):
        self.players, self.spec, self.steps, self.device = players, players.spec, steps, device
        self.algorithms = [a for a in players.algorithms if a.learns]
        for a in players.algorithms:
            a.eval()  # but while it learns
        self.noise, self.update_noise, self.greedy_noise = (
            generator(seed, k, device=device) for k in ("collect", "update", "play")
        )
        self.updates, self._step, self._scheduled = 0, 0, 0
        self.extras = self._try_acting()
        self.step = 0

    @property
    def step(self) -> int:
        """Environment steps so far: `act` counts them. What is scheduled goes by it, and is set when this is, or at the first
        step after an update."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self._scheduled = step, self.updates
        for a in self.algorithms:
            a.set_schedules(Now(step, self.steps, self.updates))

    # --- acting ---

    @torch.no_grad()
    def act(
        self,
        obs: Any,
        memory: dict[str, Any] | None = None,
        *,
        start: Any = None,
        legal: Any = None,
        alive: Any = None,
        active: Any = None,
        state: Any = None,
        explore: bool = True,
    ) -> Decision:
        """What all do who see `obs` [B, N, ...]. `memory` is that of the step before, none where all rows begin an episode;
        `start` says which begin one. Without `explore` all play as in an evaluation: nothing is counted, and training draws as
        if it had not been."""
        given = {"obs": obs, "start": start, "legal": legal, "alive": alive, "active": active, "state": state}
        arrays = Arrays(self.spec, given, "B", self.device)
        (rows,) = arrays.lead
        frame = frame_of(arrays, memory is None, any(a.recurrent for a in self.algorithms))
        memory = self._memory(memory, rows)
        if explore and self._scheduled != self.updates:
            self.step = self._step
        noise = self.players.noise(self.noise if explore else self.greedy_noise, rows)
        acted = self.players.act(frame, memory, noise, explore, greedy=not explore)
        self._step += rows if explore else 0
        parts = {"start": {g: v.start for g, v in frame.views.items()}, "action": acted.actions}
        for g, extras in self.extras.items() if explore else ():
            for name in extras:
                parts.setdefault(name, {})[g] = acted.extras[g][name]
        as_given = self._form(arrays)
        record = {**arrays.given, **{k: as_given(x) for k, x in parts.items()}}
        actions = {g.name: to_space(g.action, acted.actions[g.name]) for g in self.spec.groups}
        return Decision(as_given(actions), acted.memory, record)

    def _form(self, arrays: Arrays) -> Callable[[dict[str, Tensor]], Any]:
        """Puts tensors of groups [B, N, ...] into the form in which observations came."""
        by_group, first = arrays.by_group("obs"), {g.name: arrays.first_obs(g) for g in self.spec.groups}
        whole = {g.name: 2 + len(next(iter(g.obs.values())) if isinstance(g.obs, dict) else g.obs) for g in self.spec.groups}

        def as_given(parts: dict[str, Tensor]) -> Any:
            out = {g: x if np.ndim(first[g]) == whole[g] else x.squeeze(1) for g, x in parts.items()}
            given = {g: x if isinstance(first[g], Tensor) else x.cpu().numpy() for g, x in out.items()}
            return given if by_group else given.popitem()[1]

        return as_given

    def _memory(self, given: Any, rows: int) -> dict[str, Any]:
        """The memory that was handed over; zeros where there is none."""
        zero = self.players.memory(rows, self.device)
        if given is None:
            return zero
        try:
            fits = all(tree_leaves(tree_map(lambda x, y: x.shape == y.shape, zero, given)))
        except (AttributeError, IndexError, KeyError, TypeError):
            fits = False
        if not fits:
            raise UserError(f"`memory` is none that `act` gave of {rows} rows: hand over what it did, or none.")
        return given

    def memory_before(self, batch: Batch, given: Any, starts: bool) -> dict[str, Any]:
        """The memory at the first step of a batch: what was handed over, or zeros where everybody begins there. `starts`: the
        batch was told who does."""
        memory = self._memory(given, batch.over.shape[1])
        held = {g: {k: x for k, x in m.items() if k not in EXPLORING} for g, m in memory.items()}
        if tree_leaves(held):
            begin = torch.cat([v.start[0] | ~v.alive[0] for v in batch.frame.views.values()], -1)
            if not starts or (given is None and not begin.all()):
                raise UserError(
                    "these learners remember from step to step: hand over `start`, and, unless all begin in the first of these "
                    "steps, as `memory` what `act` was given there."
                )
        return memory

    def _try_acting(self) -> Extras:
        """What `act` leaves beside actions: all are asked once, of zeros, which changes nothing."""
        groups, device = self.spec.groups, self.device

        def blank(g: Group, shape: Any) -> Any:
            if isinstance(shape, dict):
                return {k: blank(g, s) for k, s in shape.items()}
            return torch.zeros(1, g.n, *shape, device=device)

        given = {
            "obs": {g.name: blank(g, g.obs) for g in groups},
            "legal": {g.name: blank(g, (params_of(g.action),)) for g in groups if g.masked},
            "active": {g.name: blank(g, ()) for g in groups if self.spec.turns},
            "state": None if self.spec.state is None else torch.zeros(1, self.spec.state, device=device),
        }
        noise = self.players.noise(generator(0, "try", device=device), 1)
        with torch.no_grad():
            frame = frame_of(Arrays(self.spec, given, "B", device))
            acted = self.players.act(frame, self.players.memory(1, device), noise, explore=True)
        return {g: {k: tuple(x.shape[2:]) for k, x in acted.extras[g].items()} for a in self.algorithms for g in a.groups}

    # --- learning ---

    def update(self, samples: dict[str, Samples]) -> dict[str, dict[str, Tensor]]:
        """One update of every learner that there are samples of: its metrics, by its groups. Those of one with a replay are of
        sequences that were drawn; a `priority` among the metrics is for drawing them."""
        metrics = {}
        if not isinstance(samples, dict) or not any(
            isinstance(samples.get(g), Samples) for a in self.algorithms for g in a.groups
        ):
            raise UserError("update takes what shoal.samples(learner, arrays) gives, and this is something else.")
        for a in self.algorithms:
            if (mine := samples.get(a.groups[0])) is None:
                continue
            length, wanted = len(mine.batch.over), a.feed.length if isinstance(a.feed, Replay) else a.feed.steps
            if mine.learner is not a or length != wanted:
                what = f"samples of {length} steps" if mine.learner is a else "another learner's samples"
                raise UserError(
                    f"{a.id} of {' and '.join(a.groups)} takes its own samples of {wanted} steps, and was given {what}."
                )
            a.variant()
            a.train()  # the user's own modules may act otherwise than they learn
            metrics[",".join(a.groups)] = a.update(mine)
            a.eval()
        self.updates += 1
        return metrics

    def update_statistics(self, samples: dict[str, Samples]) -> None:
        """Let statistics of those who learn from a replay move, by what was played just now; others' move in `update`."""
        for a in self.algorithms:
            if isinstance(a.feed, Replay) and a.groups[0] in samples:
                a.update_statistics(samples[a.groups[0]].batch)

    # --- to be saved ---

    def state_dict(self) -> dict[str, Any]:
        """All that goes on: what algorithms hold, generators and counts."""
        algorithms = {",".join(a.groups): dict(a.state_dict()) for a in self.players.algorithms}
        counts = [self._step, self.updates, self._scheduled]
        return {"algorithms": algorithms, "generators": [x.get_state() for x in self._generators], "counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for a in self.players.algorithms:
            a.load_state_dict(state["algorithms"][",".join(a.groups)])
        for mine, theirs in zip(self._generators, state["generators"], strict=True):
            restore_generator(mine, theirs)
        self._step, self.updates, self._scheduled = state["counts"]

    @property
    def _generators(self) -> tuple[torch.Generator, ...]:
        return self.noise, self.update_noise, self.greedy_noise


def learner(
    algorithm: Any,
    spec: EnvSpec,
    /,
    *,
    algo: dict[str, Any] | None = None,
    net: dict[str, Any] | None = None,
    groups: dict[str, dict[str, dict[str, Any]]] | None = None,
    team: dict[str, str] | None = None,
    steps: int = 1_000_000,
    seed: int = 0,
    device: str = "cpu",
) -> Learner:
    """Who plays a world, outside any run, with the first weights of a run of this seed. Settings are those of `shoal.train`;
    `spec` is an environment's, `shoal.make(env).spec`, or written by hand; schedules end after so many `steps`."""
    if not isinstance(spec, EnvSpec):
        raise UserError(f"spec is {spec!r:.60}: it takes an EnvSpec (shoal.spec), such as shoal.make(env).spec.")
    sections = {k: dict(v) for k, v in {"algo": algo, "net": net}.items() if v}
    run = build(RunConfig, {"steps": steps, "seed": seed, "device": device}, "run")
    settings = Settings(id_of("algos", algorithm), "", {"steps": run.steps}, sections, groups or {}, team or {})
    if needs_common_pay(settings, spec) and not spec.common:
        raise UserError(
            f"{settings.algo} needs agents that are paid alike: pay each its team's mean, and say EnvSpec(common=True)."
        )
    place = choose_device(run.device)
    players = make_players(settings, spec, run.seed, place)
    if any(getattr(a.config, "shaper", None) for a in players.algorithms):
        raise UserError("a shaper is a run's: shape the rewards that you hand to shoal.samples.")
    return Learner(players, run.seed, run.steps, place)


def samples(learner: Learner, arrays: dict[str, Any], generator: torch.Generator | None = None) -> dict[str, Samples]:
    """What `update` takes, by group: `learner.update(samples)` is an update of all algorithms; of one alone that is
    `samples[g].learner.update(samples[g])`. They are made for a learner, and a spec does not do: its statistics normalise them,
    its settings scale rewards and say where returns end. `training/arrays.py` says what `arrays` are. Uniform numbers for an
    update's own draws are of `generator`, or else of the learner's."""
    if not isinstance(learner, Learner):
        raise UserError(
            f"samples are a learner's, for its statistics and settings are in them, and this is {type(learner).__name__}: take "
            "shoal.learner(algorithm, spec)."
        )
    looked_over = Arrays(learner.spec, arrays, "TB", learner.device, learner.extras)
    batch = batch_of(looked_over, learner.extras, {})
    if (episodes := rollout_episodes(learner.players.algorithms)) is not None:
        batch = whole_episodes(batch, episodes)
    batch.memory = learner.memory_before(batch, arrays.get("memory"), "start" in looked_over.given)
    out: dict[str, Samples] = {}
    for a in learner.algorithms:
        count, draw = a.draws(*batch.over.shape), generator or learner.update_noise
        mine = Samples(a, replace(batch, noise=torch.rand(count, generator=draw, device=learner.device)))
        out |= dict.fromkeys(a.groups, mine)
    return out


def whole_episodes(batch: Batch, episodes: int) -> Batch:
    """Of each row the first so many episodes (`--algo.episodes`); what comes after them is padding."""
    if bool((batch.over.sum(0) < episodes).any()):
        raise UserError(
            f"--algo.episodes is {episodes}: so many whole episodes of each row must have ended in these steps, and there are "
            "fewer."
        )
    filled = batch.over.long().cumsum(0) - batch.over.long() < episodes
    filled = filled if batch.filled is None else filled & batch.filled
    if bool(filled.all()):
        return batch
    over = torch.cat((batch.over[:-1], torch.ones_like(batch.over[-1:])))
    return replace(batch, over=over, filled=filled)
