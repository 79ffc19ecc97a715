"""The loop: collect, bonus, update, log, evaluate, save. The page to read first.

    loop = Loop(resolved)           worlds, players, trainers: `parts.py`
    loop.run()                      until the steps are done, or something stops it

It knows no algorithm: what is due, and of what kind, is in each one's `feed`. Around it: `start.py` (start, resume),
`session.py` (the run's folder while it trains), `state.py` (exact resume), `speedup.py` (kernels and graphs), `shaping.py`,
`finite.py`.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import nullcontext

import torch
from torch import Tensor

from shoal.algos.base import Algorithm, Rollout
from shoal.algos.samples import Samples
from shoal.log import report
from shoal.log.console import Display, clock, short
from shoal.ops.schedules import Now
from shoal.spec import Batch, UserError
from shoal.training import checkpoint
from shoal.training.diverged import check_finite
from shoal.training.ending import compare_with_best
from shoal.training.evaluate import AbandonedError
from shoal.training.offpolicy import transitions_of
from shoal.training.parts import LoopParts
from shoal.training.seeds import global_seed
from shoal.training.session import session
from shoal.training.signals import on_signals
from shoal.training.state import loop_state, saved_replay


class Loop(LoopParts):
    # --- an iteration ---

    def iterate(self) -> None:
        """Collect a rollout and learn from it; then from the replay, as often as these steps are worth."""
        before, after = self.step, self.step + self.rollout * self.env.rows
        done = {id(trainer.algorithm): trainer.updates_due(before) for trainer in self.trainers}
        due = [trainer.updates_due(after) - trainer.updates_due(before) for trainer in self.trainers]
        self.now.fill_(self.step)
        for a in self.learners:
            a.set_schedules(Now(before, self.config.steps, done.get(id(a), before // (after - before))))
        for trainer in self.trainers:
            trainer.set_schedules(Now(before, self.config.steps, 0))
        seed = self.config.seed, "modules", self.step
        with global_seed(*seed, device=self.env.device) if self.draws_globally else nullcontext():
            self.on_device()
            self.step = after
            for k, updates in enumerate(due):
                for _ in range(updates):
                    self.on_device_updates[k]()  # if it cannot be captured, the next one is the plain trainer

    def collect_and_update(self) -> None:
        """What an iteration is on the device: nothing here waits for it or looks at it, so that it can be captured."""
        batch = self.collector.collect(self.rollout)
        self.shaping(batch)
        self.bonus(batch)
        for limit in self.overestimation.limits.values():
            limit.count(batch)
        for a in self.learners:
            if isinstance(a.feed, Rollout):
                self.update(a, batch)
        if self.replay is not None:
            memory = batch.memories or batch.memory
            self.replay.put(transitions_of(batch), {g: memory[g] for g in self.stored_memory})
            for trainer in self.trainers:
                trainer.sampler.wrote(self.rollout)
                trainer.algorithm.update_statistics(batch)
        self.collector.episode_stats.count(batch)
        if self.not_finite is not None:
            steps = self.now + torch.arange(self.rollout, device=self.env.device) * self.env.rows
            self.not_finite.note(batch, steps)

    def bonus(self, batch: Batch) -> None:
        """The hook for intrinsic rewards, to be added to `batch.learner_reward`. There are none here."""

    def update(self, learner: Algorithm, batch: Batch) -> Tensor | None:
        """One learner, one update. Returns the priorities that it gave."""
        batch.noise = torch.rand(learner.draws(*batch.over.shape), generator=self.update_noise, device=batch.over.device)
        own = learner.net.module is not None  # the user's modules may act otherwise than they learn; ours know no modes
        if own:
            learner.train()
        metrics = learner.update(Samples(learner, batch))
        if own:
            learner.eval()
        priority = metrics.pop("priority", None)
        self.means.add(",".join(learner.groups), metrics)
        return priority

    def uniform(self, count: int) -> Tensor:
        """Numbers to draw from the replay with."""
        return torch.rand(count, dtype=torch.float64, generator=self.update_noise, device=self.env.device)

    # --- a run ---

    def run(self) -> str | None:
        """Train to the end. Returns why it stopped early, or none."""
        with on_signals(self.interrupt):
            for _ in self.iterations():
                pass
        return self.stopped

    def iterations(self, console: Display | None = None) -> Generator[None, None, None]:
        """The run, an iteration at a time: several can be driven in turn."""
        goal = min(self.config.steps, self.config.until or self.config.steps)
        with session(self, goal, console):
            if not self.restored or self.evaluation_due:
                self.evaluate()
                self.save()
            elif self.branched:
                self.save()
            self.tell_news()
            while self.step < goal and self.stopped is None:
                self.hooks.note("before_iteration", self)
                before = self.step
                self.iterate()
                self.tell_news()
                self.seconds = time.perf_counter() - self.began
                self.hooks.note("after_iteration", self)
                self.console.advance(self.step, self.step / max(self.seconds, 1e-9))
                if self._due(before, self.resolved.log.every, 100):
                    self.log()
                if self._due(before, self.resolved.eval.every, 20):
                    self.evaluate()
                if self._due(before, self.resolved.save.every, 10) or self.step >= goal:
                    self.save(numbered=True)
                self.check_time()
                yield
            if self.stopped is not None:
                self.save()
            compare_with_best(self)

    def log(self) -> None:
        """A line of training metrics: means since the last one."""
        metrics = {**self.means.take(), **self.hooks.take(self.env.device), **self.collector.episode_stats.take()}
        if self.env.halves:
            metrics["worker_restarts"] = torch.tensor(float(self.env.restarts + self.eval_env.restarts))  # so far
        self.last_train = self.logger.write(self.step, self.seconds, "train", metrics)
        self.console.scores(self.last_train, [g.name for g in self.env.spec.groups])
        check_finite(self)
        self.overestimation.look(self)

    def evaluate(self) -> None:
        """Whole episodes; abandoned where a signal or --time asks to leave, and then to be done after a resume."""
        if self.resolved.eval.every == 0:
            return
        self.evaluation_due = True
        try:
            episodes = self.play_episodes(self.eval_env, self.players, self.eval_each, self.config.seed)
            metrics = {**self.hooks.call("on_evaluation", self, episodes), **episodes.metrics()}
        except AbandonedError:
            return self.check_time()
        except UserError:  # training is whole, and nothing of it need be lost
            self.save()
            raise
        self.evaluation_due = False
        numbers = self.logger.write(self.step, self.seconds, "eval", metrics)
        self.evaluations += 1
        self.evaluation_sum += episodes.each().cpu()
        self.logger.say(report.evaluation_line(self.report_facts(), episodes))
        scores = "  ".join(f"{g.name} {numbers[f'return/{g.name}']:.2f}" for g in self.env.spec.groups)
        rate = short(self.step / self.seconds) if self.seconds and self.step else "-"
        self.console.line(f"step {self.step:>10,}  {clock(self.seconds)}  {rate:>6} steps/s  evaluation: {scores}")
        score = numbers[self.score_name]
        if score is not None and score >= self.best:  # of equals the later, which has learnt for longer
            check_finite(self)
            self.best = score
            if self.resolved.save.best != "none":
                self.folder.write_checkpoint("best", loop_state(self), self.nets_to_save())
        if score is not None and self.config.stop_score is not None and score >= self.config.stop_score:
            self.stop(f"the score is {score:.4g}")

    def save(self, numbered: bool = False) -> None:
        check_finite(self)
        self.folder.refuse_links()
        state, nets = loop_state(self), self.nets_to_save()
        if numbered and self.resolved.save.keep:
            self.folder.write_checkpoint(f"step-{self.step:012d}", state, nets)
            checkpoint.prune(self.folder.checkpoints, self.resolved.save.keep)
        self.folder.write_checkpoint("last", {**state, **saved_replay(self)}, nets)
        if self.replay is not None:
            self.segments.prune()
        self.logger.refresh()
