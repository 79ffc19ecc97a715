"""The loop: collect, bonus, update, log, evaluate, save. The page to read first.

    loop = Loop(resolved, run)      worlds, players, logs
    loop.run()                      until the steps are done, or something stops it

It knows no algorithm: what is due, and of what kind, is in each one's `feed`.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.algos.base import Optimiser
from shoal.flags import parse_span
from shoal.ids import near
from shoal.log import report, wandb
from shoal.log.console import Progressor, clock, short
from shoal.log.logger import Logger, cut
from shoal.spec import Batch, UserError
from shoal.training import checkpoint
from shoal.training.collect import Collector
from shoal.training.evaluate import Episodes, evaluate, metric_names, rows_for
from shoal.training.players import load_weights, make_players, recorded_players, restore_players, rollout_steps
from shoal.training.run import Run, slug
from shoal.training.seeds import generator
from shoal.training.settings import Resolved


class Hook:
    """Code of one's own in a run. Each method may return metrics: those of an evaluation are logged with it, the others with
    the next line of training; `loop.stop(why)` stops."""

    def before_iteration(self, loop: Loop) -> dict[str, Any] | None:
        return None

    def after_iteration(self, loop: Loop) -> dict[str, Any] | None:
        return None

    def on_evaluation(self, loop: Loop, episodes: Episodes) -> dict[str, Any] | None:
        return None


class DivergedError(RuntimeError):
    """A loss was not finite. The last good checkpoint is in place."""


class Loop:
    """A run under way. `folder` is the run to go on with; without, it is set before `run()`."""

    folder: Run

    def __init__(self, resolved: Resolved, hooks: Sequence[Hook] = (), folder: Run | None = None):
        self.resolved, self.hooks = resolved, list(hooks)
        self.config, device = resolved.run, resolved.device
        torch.set_num_threads(self.config.threads)
        self.env = resolved.make_env(self.config.envs)
        rows, self.eval_each = rows_for(resolved.eval.episodes)
        self.eval_env = resolved.make_env(rows)
        common = self.env.spec.common or self.config.reward != "own"
        spec = dataclasses.replace(self.env.spec, common=common)  # as the learners are paid
        if folder is None:
            self.players = make_players(resolved.settings, spec, self.config.seed, device)
        else:
            self.folder, self.players = folder, recorded_players(folder, spec, device)
        self.learners = [a for a in self.players.algorithms if a.learns]
        self.rollout = rollout_steps(self.players.algorithms)
        names = metric_names(self.env.spec)
        if self.score_name not in names:
            raise UserError(f"--save.best is {self.score_name!r}{near(self.score_name, names)}: it takes {', '.join(names)}.")
        self.collector = Collector(self.env, self.players, generator(self.config.seed, "collect", device=device))
        self.update_noise = generator(self.config.seed, "update", device=device)
        self.step, self.seconds, self.best = 0, 0.0, float("-inf")
        self.evaluations, self.evaluation_sum = 0, torch.zeros(sum(g.n for g in self.env.spec.groups), dtype=torch.float64)
        self.pending: dict[str, list[Tensor]] = {}  # metrics since the last line
        self.last_train: dict[str, Any] = {}
        self.stopped: str | None = None
        self.signal: int | None = None
        self.restored = False
        self.logs_at: dict[str, int] = {"metrics.jsonl": 0, "train.log": 0}  # how long the logs were at the checkpoint
        if resolved.log.wandb:
            wandb.require(resolved.log)
        if self.config.init and folder is None:
            load_weights(self.players, self.config.init)

    @property
    def score_name(self) -> str:
        """The metric of evaluations that `best`, and stopping at a score, go by."""
        group = self.learners[0].groups[0] if self.learners else self.env.spec.groups[0].name
        return f"return/{group}" if self.resolved.save.best in ("auto", "none") else self.resolved.save.best

    # --- the loop ---

    def run(self) -> str | None:
        """Train to the end. Returns why it stopped early, or none."""
        restore = self._catch_signals()
        lock = self.folder.lock()
        cut(self.folder.path, self.logs_at)
        if self.folder.settings.run["steps"] != self.config.steps:
            self.folder.set_steps(self.config.steps)
        c, began = self.config, time.perf_counter() - self.seconds
        limit = parse_span(c.time, "--time")
        goal = min(c.steps, c.until or c.steps)
        self.logger = self._open_log()
        self.console = Progressor(c.steps, self.step, c.quiet)
        try:
            if not self.restored:
                self.evaluate()
                self.save()
            while self.step < goal and self.stopped is None:
                self._note("before_iteration")
                before = self.step
                batch = self.collector.collect(self.rollout)
                self.step += self.rollout * self.env.rows
                self.pay(batch)
                self.update(batch)
                self.seconds = time.perf_counter() - began
                self._note("after_iteration")
                self.console.advance(self.step, self.step / max(self.seconds, 1e-9))
                if self._due(before, self.resolved.log.every, 100):
                    self.log()
                if self._due(before, self.resolved.eval.every, 20):
                    self.evaluate()
                if self._due(before, self.resolved.save.every, 10) or self.step >= goal:
                    self.save(numbered=True)
                if limit is not None and self.seconds >= limit:
                    self.stop(f"--time {c.time} is up")
            if self.stopped is not None:
                self.save()
        finally:
            self.console.close()
            self.logger.close()
            restore()
            lock.close()
        return self.stopped

    def pay(self, batch: Batch) -> None:
        """What the learners are paid: their own reward or their team's, and the world's shaping. Returns stay raw."""
        for groups in self.env.spec.teams.values():
            rewards = [batch.pays[g.name].reward for g in groups]
            if self.config.reward != "own":
                team = torch.cat(rewards, -1)  # [T, B, all agents of the team]
                total = team.sum(-1, keepdim=True) / (team.shape[-1] if self.config.reward == "team-mean" else 1)
                rewards = [total.expand_as(r) for r in rewards]
            for g, reward in zip(groups, rewards, strict=True):
                shaping = batch.pays[g.name].shaping
                batch.paid[g.name] = reward if shaping is None else reward + shaping

    def update(self, batch: Batch) -> None:
        """Every learner on the same batch."""
        device = batch.over.device
        for a in self.learners:
            a.tune(min((self.step - batch.over.numel()) / self.config.steps, 1.0))
            batch.noise = torch.rand(a.draws(*batch.over.shape), generator=self.update_noise, device=device)
            for name, x in a.update(batch).items():
                for g in a.groups:
                    self.pending.setdefault(f"{g}/{name}", []).append(x)

    def log(self) -> None:
        metrics = {k: torch.stack([torch.as_tensor(x) for x in xs]).double().mean() for k, xs in self.pending.items()}
        self.pending.clear()
        metrics = {**metrics, **self.collector.tally.take()}  # nobody's hook overwrites a return
        self.last_train = self.logger.write(self.step, self.seconds, "train", metrics)
        self.console.scores(self.last_train, [g.name for g in self.env.spec.groups])
        self.check_finite()

    def check_finite(self) -> None:
        """Asked before anything is written: a gradient that was not finite, or a weight that is not."""
        broken = any(bool(m.broken) for a in self.learners for m in a.modules() if isinstance(m, Optimiser))
        weights = (x for a in self.learners for x in a.state_dict().values() if x.is_floating_point())
        if broken or not all(bool(x.isfinite().all()) for x in weights):
            raise DivergedError(
                f"a loss was not finite before step {self.step:,}, and training stopped; the last good checkpoint is in "
                f"{self.folder.checkpoints}. Try a smaller learning rate."
            )

    def evaluate(self) -> None:
        e = self.resolved.eval
        if e.every == 0:
            return
        modes = [a.training for a in self.players.algorithms]
        for a in self.players.algorithms:
            a.eval()
        episodes = evaluate(self.eval_env, self.players, self.eval_each, self.config.seed, e.sampled)
        for a, mode in zip(self.players.algorithms, modes, strict=True):
            a.train(mode)
        metrics = {**self._ask("on_evaluation", episodes), **episodes.metrics()}
        numbers = self.logger.write(self.step, self.seconds, "eval", metrics)
        self.evaluations += 1
        self.evaluation_sum += episodes.each().cpu()
        self.logger.say(report.evaluation_line(self, episodes))
        scores = "  ".join(f"{g.name} {numbers[f'return/{g.name}']:.2f}" for g in self.env.spec.groups)
        rate = short(self.step / self.seconds) if self.seconds and self.step else "-"
        self.console.line(f"step {self.step:>10,}  {clock(self.seconds)}  {rate:>6} steps/s  evaluation: {scores}")
        score = numbers[self.score_name]
        if score is not None and score > self.best:
            self.check_finite()
            self.best = score
            if self.resolved.save.best != "none":
                checkpoint.write(self.folder.checkpoints / "best.pt", self.state_dict())
        if score is not None and self.config.stop_score is not None and score >= self.config.stop_score:
            self.stop(f"the score is {score:.4g}")

    def save(self, numbered: bool = False) -> None:
        self.check_finite()
        state, folder = self.state_dict(), self.folder.checkpoints
        if numbered and self.resolved.save.keep:
            checkpoint.write(folder / f"step-{self.step:012d}.pt", state)
            checkpoint.prune(folder, self.resolved.save.keep)
        checkpoint.write(folder / "last.pt", state)
        self.logger.refresh()

    def stop(self, why: str) -> None:
        """Save and leave after this iteration."""
        self.stopped = self.stopped or why

    # --- exact resume ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "shoal": 1,
            "env": slug(self.resolved.settings.env),
            "algo": slug(self.resolved.settings.algo),
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "evaluations": self.evaluations,
            "evaluation_sum": self.evaluation_sum.clone(),
            "algorithms": {",".join(a.groups): a.state_dict() for a in self.players.algorithms},
            "collector": self.collector.state_dict(),
            "update_noise": self.update_noise.get_state(),
            "pending": {k: [torch.as_tensor(x).clone() for x in xs] for k, xs in self.pending.items()},
            "last_train": self.last_train,
            "logs": self.logger.mark(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore_players(self.players, state, str(self.folder.path))
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        self.evaluations, self.last_train = state["evaluations"], state["last_train"]
        self.evaluation_sum.copy_(state["evaluation_sum"])
        self.collector.load_state_dict(state["collector"])
        self.update_noise.set_state(state["update_noise"].cpu())
        self.pending = {k: [x.to(self.env.device) for x in xs] for k, xs in state["pending"].items()}
        self.restored, self.logs_at = True, state["logs"]

    # --- inside ---

    def _due(self, before: int, every: int | str, share: int) -> bool:
        """Whether this iteration crossed a multiple of `every`, or ended the run. Host counts alone decide."""
        if every == 0:
            return False
        every = max(self.config.steps // share, 1) if every == "auto" else int(every)
        return self.step // every > before // every or self.step >= self.config.steps

    def _note(self, moment: str) -> None:
        """Ask the hooks, and keep what they want logged for the next line."""
        for k, x in self._ask(moment).items():
            self.pending.setdefault(k, []).append(x)

    def _ask(self, moment: str, *args: Any) -> dict[str, Tensor]:
        answers = [(getattr(hook, moment)(self, *args) or {}).items() for hook in self.hooks]
        try:
            return {k: torch.as_tensor(x) for items in answers for k, x in items}
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"a hook's {moment} returned something that is no number: it takes a dict of numbers.") from None

    def _open_log(self) -> Logger:
        folder, settings = self.folder.path, self.resolved.settings
        new = not (folder / "train.log").exists()
        plain = {"algo": settings.algo, "env": settings.env, **settings.run, **settings.sections}
        logger = Logger(folder, self.resolved.log, "/".join(folder.parts[-3:]), plain, None if new else self.step)
        if new:
            logger.say(report.header(self))
        return logger

    def _catch_signals(self) -> Any:
        """Ctrl-C and SIGTERM stop after the iteration; a second Ctrl-C stops at once."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def catch(number: int, _: Any) -> None:
            if self.signal is not None:
                raise KeyboardInterrupt
            self.signal = number
            self.stop("interrupted" if number == signal.SIGINT else "terminated")

        before = {s: signal.signal(s, catch) for s in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for s, handler in before.items():
                signal.signal(s, handler)

        return restore


def resume(
    path: str | Path, steps: int | None = None, hooks: Sequence[Hook] = (), quiet: bool = False, device: str | None = None
) -> Loop:
    """The loop of a run as it was at its last checkpoint, or at its beginning where it has none yet."""
    run = Run(path)
    resolved = run.resolve(device)
    state = run.load("last") if (run.checkpoints / "last.pt").exists() else None
    expected = slug(run.settings.env), slug(run.settings.algo)
    if state is not None and (state["env"], state["algo"]) != expected:
        raise UserError(
            f"the last checkpoint of {path} is of {state['algo']} on {state['env']}, and the run is of "
            f"{expected[1]} on {expected[0]}."
        )
    done = state["step"] if state else 0
    if steps is not None and steps <= done:
        raise UserError(f"--steps is {steps} and the run has done {done} already: it sets a new total.")
    changed: dict[str, Any] = {"until": None, "time": None, "quiet": quiet}  # what an earlier call asked for itself
    changed.update({} if steps is None else {"steps": steps})
    config = dataclasses.replace(resolved.run, **changed)
    loop = Loop(dataclasses.replace(resolved, run=config), hooks, run)
    if state is not None:
        loop.load_state_dict(state)
    elif config.init:
        load_weights(loop.players, config.init)
    return loop
