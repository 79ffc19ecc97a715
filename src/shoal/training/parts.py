"""What a loop is made of: worlds, players, trainers, statistics, counts; and how it is told to stop."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoal.algos.base import Algorithm
from shoal.envs.base import Environment
from shoal.ids import near
from shoal.log import wandb
from shoal.log.console import Display
from shoal.log.logger import Logger
from shoal.log.report import Facts
from shoal.spec import Batch, UserError
from shoal.training.collect import Players
from shoal.training.evaluate import AbandonedError, Episodes, evaluate, metric_names, rows_for
from shoal.training.finite import FirstNotFinite
from shoal.training.halves import make_collector
from shoal.training.hooks import Hook, Hooks
from shoal.training.netfiles import net_files
from shoal.training.overestimation import Overestimation
from shoal.training.players import (
    common_pay,
    decide_reward,
    load_weights,
    make_players,
    recorded_players,
    rollout_episodes,
    rollout_steps,
)
from shoal.training.replay import cost, make_trainers, memory_to_store
from shoal.training.run import Run
from shoal.training.seeds import generator
from shoal.training.segments import Segments
from shoal.training.settings import Resolved
from shoal.training.shapers import Shapers, shapers_of
from shoal.training.shaping import Shaping
from shoal.training.speedup import set_backends, speed_up
from shoal.training.stats import MetricMeans


class LoopParts(ABC):
    """A run under way. `folder` is the run to go on with; without, it is set before training begins."""

    folder: Run
    logger: Logger
    console: Display

    def __init__(self, resolved: Resolved, hooks: Sequence[Hook] = (), folder: Run | None = None, shaper: Shapers = None):
        device, kernels = resolved.device, set_backends(resolved.run, resolved.device)
        self.env = resolved.make_env(resolved.run.envs)
        self.resolved = resolved = decide_reward(resolved, self.env.spec)
        self.config, seed = resolved.run, resolved.run.seed
        rows, self.eval_each = rows_for(resolved.eval.episodes, self.env.widest)
        self.eval_env = resolved.make_env(rows)
        common = self.env.spec.common or self.config.reward != "own"
        spec = dataclasses.replace(self.env.spec, common=common)  # as the learners are paid
        if folder is None:
            self.players = make_players(resolved.settings, spec, seed, device, kernels)
        else:
            self.folder, self.players = folder, recorded_players(folder, spec, device, kernels)
        for a in self.players.algorithms:
            a.eval()  # but while it learns
        self.learners = [a for a in self.players.algorithms if a.learns]
        self.rollout = rollout_steps(self.players.algorithms)
        names = metric_names(self.env.spec)
        if self.score_name not in names:
            raise UserError(f"--save.best is {self.score_name!r}{near(self.score_name, names)}: it takes {', '.join(names)}.")
        self.now = torch.zeros((), dtype=torch.long, device=device)  # the step, where what is captured can see it
        shapers = shapers_of(self.learners, shaper, [g.name for g in spec.groups])
        self.shaping = Shaping(self.env.spec, self.config.reward, shapers, self.now, self.config.steps)
        own_modules = any(a.net.module is not None for a in self.learners)
        self.draws_globally = bool(shapers) or own_modules  # code of the user's own may
        self.collector = make_collector(self.env, self.players, generator(seed, "collect", device=device))
        if not self.env.fixed_length:  # else rows have played whole episodes, and have begun new ones
            self.collector.episodes = rollout_episodes(self.players.algorithms)
        self.update_noise = generator(seed, "update", device=device)
        self.not_finite = None if self.env.halves else FirstNotFinite(self.env)  # Python environments look for themselves
        self.hooks, self.means = Hooks(hooks), MetricMeans({g.name: g.n for g in spec.groups})  # since the last line
        for a in self.learners:
            a.metric_agents = a.n if resolved.log.agents else None
        self.overestimation = Overestimation(self.learners, self.env.rows, device, known=self.config.init is None)
        self.step, self.seconds, self.best = 0, 0.0, float("-inf")
        self.last_train: dict[str, object] = {}
        self.evaluations, self.evaluation_sum = 0, torch.zeros(sum(g.n for g in self.env.spec.groups), dtype=torch.float64)
        self.evaluating, self.evaluation_due = False, False  # one is under way; one was abandoned
        self.stopped: str | None = None
        self.signal: int | None = None
        self.began, self.limit = 0.0, math.inf  # when this run would have begun had it never stopped; seconds it may take
        self.restored = False
        self.branched = False  # it goes on from another checkpoint than the last
        self.logs_at: dict[str, int] = {"metrics.jsonl": 0, "train.log": 0}  # how long the logs were at the checkpoint
        note = resolved.env_entry.note
        self.remarks: list[str] = [note] if note and folder is None else []  # sentences for the console and train.log
        if folder is None:
            self.remarks += common_pay(self.learners, self.env.spec, self.config.reward)
            self.remarks += [a.remark for a in self.learners if a.remark]
        self.replay, self.trainers = make_trainers(self.learners, self.collector, self.rollout, self.update, self.uniform)
        self.stored_memory = tuple(memory_to_store(self.learners, self.collector.memory))  # groups whose memory it holds
        self.remarks += [cost(self.replay)] if self.replay is not None else []
        self.on_device: Callable[[], None] = self.collect_and_update
        self.on_device_updates: list[Callable[[], None]] = [*self.trainers]
        speed_up(self)  # type: ignore[arg-type]
        self.shaping.try_out(self.collector.frame, self.env.rows)
        if resolved.log.wandb:
            wandb.require(resolved.log)
        if self.config.init is not None and folder is None:
            load_weights(self.players, self.config.init)

    @abstractmethod
    def collect_and_update(self) -> None: ...

    @abstractmethod
    def uniform(self, count: int) -> Tensor: ...

    @abstractmethod
    def update(self, learner: Algorithm, batch: Batch) -> Tensor | None: ...

    @property
    def score_name(self) -> str:
        """The metric of evaluations that `best`, and stopping at a score, go by."""
        group = self.learners[0].groups[0] if self.learners else self.env.spec.groups[0].name
        return f"return/{group}" if self.resolved.save.best in ("auto", "none") else self.resolved.save.best

    @cached_property
    def segments(self) -> Segments:
        """Where the replay's contents are kept."""
        return Segments(self.folder.checkpoints / "replay")

    def nets_to_save(self) -> dict[str, dict[str, Any]]:
        """What is in files of nets, by their names, where they are asked for."""
        return {k: x for a in self.learners for k, x in net_files(a).items()} if self.resolved.save.nets else {}

    def play_episodes(self, env: Environment, players: Players, each: int, seed: int) -> Episodes:
        """Those of an evaluation; a signal or --time ends them in the middle."""
        e = self.resolved.eval
        self.evaluating = True
        try:
            return evaluate(env, players, each, seed, e.sampled, longest=e.longest, abandon=self.leaving)
        finally:
            self.evaluating = False

    def _due(self, before: int, every: int | str, share: int) -> bool:
        """Whether this iteration crossed a multiple of `every`, or ended the run. Host counts alone decide."""
        if every == 0:
            return False
        every = max(self.config.steps // share, 1) if every == "auto" else int(every)
        return self.step // every > before // every or self.step >= self.config.steps

    # --- what people are told ---

    def report_facts(self) -> Facts:
        average = (self.evaluation_sum / self.evaluations).tolist()
        earned = self.collector.episode_stats.take_earned().tolist() if self.step else None
        return Facts(self.step, self.seconds, self.env.spec, self.learners, average, earned, self.last_train)

    def tell_news(self) -> None:
        """What the worlds have to say: a worker was replaced, a row could not be restored."""
        self.eval_env.news[:] = [x for x in self.eval_env.news if x not in self.env.news]
        for env in (self.env, self.eval_env):
            for sentence in env.news:
                self.remark(sentence)
            env.news.clear()

    def remark(self, sentence: str) -> None:
        self.console.line(sentence)
        self.logger.say(sentence)

    def record(self, about: str, sentence: str) -> None:
        """A remark that those who read the run later see as well."""
        self.remark(sentence)
        self.logger.remark(self.step, self.seconds, about, sentence)

    # --- stopping ---

    def stop(self, why: str) -> None:
        """Save and leave after this iteration."""
        self.stopped = self.stopped or why

    def leaving(self) -> bool:
        """Whether a signal or --time asks to leave, whatever is under way."""
        return self.signal is not None or time.perf_counter() - self.began >= self.limit

    def check_time(self) -> None:
        self.seconds = time.perf_counter() - self.began
        if self.seconds >= self.limit:
            self.stop(f"--time {self.config.time} is up")

    def interrupt(self, number: int) -> None:
        """Stop for a signal. An evaluation is abandoned at once, wherever it is: its worlds play no further part."""
        self.signal = number
        self.stop("interrupted" if number == signal.SIGINT else "terminated")
        if self.evaluating:
            raise AbandonedError
