"""The loop: collect, bonus, update, log, evaluate, save. The page to read first.

    loop = Loop(resolved, run)      worlds, players, logs
    loop.run()                      until the steps are done, or something stops it

It knows no algorithm: what is due, and of what kind, is in each one's `feed`.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.algos.base import Algorithm, Optimiser, Replay, Rollout
from shoal.buffers.replay import ReplayBuffer
from shoal.envs.base import World
from shoal.envs.workers import cores
from shoal.flags import parse_span
from shoal.ids import near, own_object
from shoal.kernels import native
from shoal.kernels.compiler import keep_memory
from shoal.log import report, wandb
from shoal.log.console import Display, Progressor, clock, short
from shoal.log.logger import Logger, cut
from shoal.ops.kernels import for_device
from shoal.ops.schedules import Now
from shoal.spec import Batch, NotFiniteError, StoppedError, TerminatedError, UserError, tree_leaves, tree_map
from shoal.training import checkpoint, trust
from shoal.training.collect import Collector
from shoal.training.evaluate import AbandonedError, Episodes, evaluate, metric_names, rows_for
from shoal.training.offpolicy import OffPolicyTrainer, Segments, break_off, cost, make_replay, moments_of, remembered
from shoal.training.players import load_weights, make_players, recorded_players, restore_players, rollout_steps
from shoal.training.run import Run, slug
from shoal.training.seeds import generator, global_seed, restore_generator
from shoal.training.settings import Resolved, most_compiled
from shoal.training.speedup import Captured, Recorded, ours
from shoal.training.stats import FirstNotFinite, MetricMeans
from shoal.training.validate import refuse_foreign_actions, refuse_strange

PYTHON = "python:"  # stands before the name of a function that cannot be found by import
SIGNALS = (signal.SIGINT, signal.SIGTERM)
Shaper = Callable[[Tensor, Any, Tensor, int], Tensor]  # (reward [T, B, N], obs, step, steps) -> reward
Shapers = Shaper | dict[str, Shaper] | None  # for all groups, or for some


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
    """A loss, or an action, was not finite. The last checkpoint, where there is one, is good."""


class Loop:
    """A run under way. `folder` is the run to go on with; without, it is set before `run()`."""

    folder: Run

    def __init__(self, resolved: Resolved, hooks: Sequence[Hook] = (), folder: Run | None = None, shaper: Shapers = None):
        self.resolved, self.hooks = resolved, list(hooks)
        self.config, device = resolved.run, resolved.device
        fused = self.config.compile == "fused" and device.type == "cpu"
        torch.set_num_threads(1 if fused else self.config.threads or 1)  # those of PyTorch spin while they wait
        native.share(self.config.threads or cores())
        keep_memory()
        self.env = resolved.make_env(self.config.envs)
        rows, self.eval_each = rows_for(resolved.eval.episodes, self.env.widest)
        self.eval_env = resolved.make_env(rows)
        common = self.env.spec.common or self.config.reward != "own"
        spec = dataclasses.replace(self.env.spec, common=common)  # as the learners are paid
        if folder is None:
            self.players = make_players(resolved.settings, spec, self.config.seed, device)
        else:
            self.folder, self.players = folder, recorded_players(folder, spec, device)
        for a in self.players.algorithms:
            a.eval()  # but while it learns
        self.learners = [a for a in self.players.algorithms if a.learns]
        self.shapers = shapers_of(self.learners, shaper, [g.name for g in spec.groups])
        self.rollout = rollout_steps(self.players.algorithms)
        names = metric_names(self.env.spec)
        if self.score_name not in names:
            raise UserError(f"--save.best is {self.score_name!r}{near(self.score_name, names)}: it takes {', '.join(names)}.")
        self.collector = Collector(self.env, self.players, generator(self.config.seed, "collect", device=device))
        self.update_noise = generator(self.config.seed, "update", device=device)
        self.step, self.seconds, self.best = 0, 0.0, float("-inf")
        self.foreign = bool(self.shapers) or any(a.net.module is not None for a in self.learners)  # of the user's own: may draw
        self.now = torch.zeros((), dtype=torch.long, device=device)  # the step, where what is captured can see it
        self.shaped_broken = torch.zeros((), dtype=torch.bool, device=device)  # a shaper gave what is not finite
        self.evaluations, self.evaluation_sum = 0, torch.zeros(sum(g.n for g in self.env.spec.groups), dtype=torch.float64)
        self.means = MetricMeans()  # of the learners' metrics since the last line
        self.noted: dict[str, list[Tensor]] = {}  # of the hooks'
        self.last_train: dict[str, Any] = {}
        self.on_device: Callable[[], None] = self.iteration
        self.on_device_lessons: list[Callable[[], None]] = []
        self.not_finite = None if self.env.halves else FirstNotFinite(self.env)  # Python environments look for themselves
        self.stopped: str | None = None
        self.signal: int | None = None
        self.began, self.limit = 0.0, math.inf  # when this run would have begun had it never stopped; seconds it may take
        self.evaluating, self.evaluation_due = False, False  # one is under way; one was abandoned
        self.restored = False
        self.branched = False  # it goes on from another checkpoint than the last
        self.logs_at: dict[str, int] = {"metrics.jsonl": 0, "train.log": 0}  # how long the logs were at the checkpoint
        note = resolved.env_entry.note
        self.remarks: list[str] = [note] if note and folder is None else []  # sentences for the console and train.log
        self.remarks += [a.remark for a in self.learners if a.remark and folder is None]
        self.replay, self.trainers = self._make_lessons()
        self.on_device_lessons += self.trainers
        self.speed_up()
        try_shapers(self)
        if resolved.log.wandb:
            wandb.require(resolved.log)
        if self.config.init is not None and folder is None:
            load_weights(self.players, self.config.init)

    def speed_up(self) -> None:
        """Kernels of our own and graphs, as `compile` asks; what cannot be had is a remark, and is done without."""
        mode, cuda = self.config.compile, self.env.device.type == "cuda"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.config.matmul == "tf32"
        torch.backends.cudnn.deterministic = True  # convolutions that add up in any order would not repeat
        native_world = isinstance(self.env, World)
        if mode != "off" and cuda and native_world:
            self.on_device = Captured(self, self.iteration, partial(setattr, self, "on_device"))
            self.eval_env.hold(self.rollout)  # it takes the same kernels
        do = self.on_device_lessons  # what cannot be captured, or recorded, puts the plain lesson back here
        for k, trainer in enumerate(self.trainers if mode != "off" else ()):
            if cuda:
                do[k] = Captured(self, trainer, partial(do.__setitem__, k), plays=False)
            elif not self.hooks and ours(self.players.algorithms if trainer.algorithm.needs_peers else [trainer.algorithm]):
                do[k] = Recorded(trainer, do, k, self.remark)
        if mode == "graph" and not cuda and most_compiled(self.env.device) == "graph":
            self.remarks.append("Nothing is compiled: there is no C compiler; with cc, gcc or clang the CPU trains faster.")
        elif mode == "graph" and not cuda and not self.trainers:
            self.remarks.append("Nothing is captured: on the CPU updates from a replay are, and nobody here learns from one.")
        if mode != "fused":
            return
        reasons = {self.env.fuse(), self.eval_env.fuse()} if native_world else set()
        why_not = for_device(self.env.device).why_not()
        self.remarks += [why for why in (*reasons, why_not) if why]
        for a in self.players.algorithms if why_not is None else ():
            a.fuse()

    def _make_lessons(self) -> tuple[ReplayBuffer | None, list[OffPolicyTrainer]]:
        """The replay, and what is learnt from it; none where nobody does."""
        learners, c = [a for a in self.learners if isinstance(a.feed, Replay)], self.collector
        if not learners:
            return None, []
        replay = make_replay(learners, self.env.spec, c.frame, self.rollout, self.env.rows, c.memory)
        self.remarks.append(cost(replay))
        replay.allocate()
        c.remembers = bool(tree_leaves(remembered(learners, c.memory)))
        return replay, [OffPolicyTrainer(a, replay, self.teach, self._uniform) for a in learners]

    @property
    def score_name(self) -> str:
        """The metric of evaluations that `best`, and stopping at a score, go by."""
        group = self.learners[0].groups[0] if self.learners else self.env.spec.groups[0].name
        return f"return/{group}" if self.resolved.save.best in ("auto", "none") else self.resolved.save.best

    # --- the loop ---

    def run(self) -> str | None:
        """Train to the end. Returns why it stopped early, or none."""
        with on_signals(self.interrupt):
            for _ in self.laps():
                pass
        return self.stopped

    def laps(self, console: Display | None = None) -> Generator[None, None, None]:
        """The run, an iteration at a time: several can be driven in turn. However it ends, it leaves nothing open."""
        lock = self.folder.lock()
        trust.sign(self.folder.path)
        if self.branched:
            self._leave_later()
        cut(self.folder.path, self.logs_at)
        if self.folder.settings.run["steps"] != self.config.steps:
            self.folder.set_steps(self.config.steps)
        c, limit = self.config, parse_span(self.config.time, "--time")
        self.began, self.limit = time.perf_counter() - self.seconds, math.inf if limit is None else limit
        goal = min(c.steps, c.until or c.steps)
        self.logger = self._open_log()
        self.console = console or Progressor(c.steps, self.step, c.quiet)
        try:
            log = (self.folder.path / "train.log").read_text(errors="replace").splitlines()
            for remark in self.remarks:
                self.console.line(remark)
                if remark not in log:  # that of a resumed run has it already
                    self.logger.say(remark)
            if isinstance(self.on_device, Captured) and self.step < goal:
                self.on_device.prepare()  # before the first evaluation: its kernels are compiled with the others
            if not self.restored or self.evaluation_due:
                self.evaluate()
                self.save()
            elif self.branched:
                self.save()
            self.tell()
            while self.step < goal and self.stopped is None:
                self._note("before_iteration")
                before = self.step
                self.iterate()
                self.tell()
                self.seconds = time.perf_counter() - self.began
                self._note("after_iteration")
                self.console.advance(self.step, self.step / max(self.seconds, 1e-9))
                if self._due(before, self.resolved.log.every, 100):
                    self.log()
                if self._due(before, self.resolved.eval.every, 20):
                    self.evaluate()
                if self._due(before, self.resolved.save.every, 10) or self.step >= goal:
                    self.save(numbered=True)
                self.look_at_the_clock()
                yield
            if self.stopped is not None:
                self.save()
        except NotFiniteError as e:
            if self.not_finite is None and not e.diverged:  # the rollout that it was in never began
                self.save()
            self.logger.say(f"Stopped: {(stopped := self._not_finite(e))}")
            raise stopped from None
        except UserError as e:
            self.logger.say(f"Stopped: {e}")
            raise StoppedError(str(e)) from e
        finally:
            self.env.close()
            self.eval_env.close()
            self.console.close()
            self.logger.close()
            lock.close()

    def iterate(self) -> None:
        """Collect a rollout and learn from it; then from the past, as often as these steps are worth."""
        before, rollouts = self.step, self.step // (self.rollout * self.env.rows)
        updates = {id(trainer.algorithm): trainer.updates_due(before) for trainer in self.trainers}
        self.now.fill_(self.step)
        for a in self.learners:
            a.set_schedules(Now(before, self.config.steps, updates.get(id(a), rollouts)))
        with global_seed(self.config.seed, "modules", self.step, device=self.env.device) if self.foreign else nullcontext():
            self.on_device()
            self.step += self.rollout * self.env.rows
            for k, trainer in enumerate(self.trainers):
                trainer.set_schedules(Now(before, self.config.steps, 0))
                for _ in range(trainer.updates_due(self.step) - trainer.updates_due(before)):
                    self.on_device_lessons[k]()

    def iteration(self) -> None:
        """What an iteration is on the device: nothing here waits for it or looks at it, so that it can be captured."""
        batch = self.collector.collect(self.rollout)
        if self.not_finite is not None:
            steps = self.now + torch.arange(self.rollout, device=self.env.device) * self.env.rows
            self.not_finite.note(batch.frame, batch.actions, batch.results, batch.next, steps)
        self.pay(batch)
        for g in self.shapers:
            self.shaped_broken |= ~batch.learner_reward[g].isfinite().all()
        for a in self.learners:
            if isinstance(a.feed, Rollout):
                self.teach(a, batch)
        if self.replay is not None:
            self.remember(batch)

    def remember(self, batch: Batch) -> None:
        """Put what happened into the replay."""
        assert self.replay is not None
        algorithms = [trainer.algorithm for trainer in self.trainers]
        self.replay.put(moments_of(batch), remembered(algorithms, batch.memories or batch.memory))
        for trainer in self.trainers:
            trainer.sampler.wrote(self.rollout)
            trainer.algorithm.update_statistics(batch)

    def pay(self, batch: Batch) -> None:
        """What the learners are paid: their own reward or their team's, and the world's shaping; then what a shaper of the
        user's makes of it. Returns stay raw."""
        for groups in self.env.spec.teams.values():
            rewards = [batch.results[g.name].reward for g in groups]
            if self.config.reward != "own":
                team = torch.cat(rewards, -1)  # [T, B, all agents of the team]
                total = team.sum(-1, keepdim=True) / (team.shape[-1] if self.config.reward == "team-mean" else 1)
                rewards = [total.expand_as(r) for r in rewards]
            for g, reward in zip(groups, rewards, strict=True):
                shaping = batch.results[g.name].shaping
                learner_reward = reward if shaping is None else reward + shaping
                shaper = self.shapers.get(g.name)
                batch.learner_reward[g.name] = (
                    learner_reward if shaper is None else self._shaped(shaper, learner_reward, batch.frame[g.name].obs, g.name)
                )

    def teach(self, a: Algorithm, batch: Batch) -> Tensor | None:
        """One learner, one update. Returns the priorities that it left."""
        batch.noise = torch.rand(a.draws(*batch.over.shape), generator=self.update_noise, device=batch.over.device)
        own = a.net.module is not None  # the user's modules may act otherwise than they learn; ours do not, and are many
        if own:
            a.train()
        metrics = a.update(batch)
        if own:
            a.eval()
        priority = metrics.pop("priority", None)
        self.means.add(",".join(a.groups), metrics)
        return priority

    def log(self) -> None:
        noted = {k: torch.stack([x.to(self.env.device) for x in xs]).double().mean() for k, xs in self.noted.items()}
        self.noted.clear()
        metrics = {**self.means.take(), **noted, **self.collector.episode_stats.take()}  # nobody's hook overwrites a return
        if self.env.halves:
            metrics["worker_restarts"] = torch.tensor(float(self.env.restarts + self.eval_env.restarts))  # so far
        self.last_train = self.logger.write(self.step, self.seconds, "train", metrics)
        self.console.scores(self.last_train, [g.name for g in self.env.spec.groups])
        self.check_finite()

    def check_finite(self) -> None:
        """Asked before anything is written: a number of the world's, a gradient or a weight that was not finite."""
        if self.not_finite is not None and (first := self.not_finite.found()) is not None:
            raise first
        if self.shapers and bool(self.shaped_broken):
            again = self._start_again("once it is mended")
            raise StoppedError(
                f"a shaper gave a reward that is not finite before step {self.step:,}, and training stopped; {again}."
            )
        sound = [~m.broken for a in self.learners for m in a.modules() if isinstance(m, Optimiser)]
        sound += [x.isfinite().all() for a in self.learners for x in a.state_dict().values() if x.is_floating_point()]
        if sound and not bool(torch.stack(sound).all()):
            raise self._diverged(f"a loss was not finite before step {self.step:,}")

    def _diverged(self, what: str) -> DivergedError:
        rates = [f"{a.config.lr:g}" for a in self.learners if getattr(a.config, "lr", None)]
        smaller = "a smaller learning rate" + (f", --algo.lr below {rates[0]}" if rates else "")
        return DivergedError(f"{what}, and training stopped; {self._start_again(f'with {smaller}')}.")

    def _not_finite(self, e: NotFiniteError) -> UserError | DivergedError:
        """What to say where training met a number of the world's, or an action, that is not finite."""
        if e.diverged:
            return self._diverged(str(e))
        env = self.resolved.settings.env
        return StoppedError(
            f"{slug(env)} gave a number that is not finite, and training stopped: {e}. `shoal check "
            f"{shlex.quote(env)}` looks a world over; {self._start_again('once it is mended')}."
        )

    def _start_again(self, how: str) -> str:
        """A run cannot be resumed with other settings, but its weights can be the beginning of another one."""
        last, run = self.folder.checkpoints / "last.pt", shlex.quote(str(self.folder.path))
        if not last.exists():
            return f"there is no checkpoint yet: start anew {how}"
        return f"the last good checkpoint is {last}: start from its weights with --init {run} {how}"

    def evaluate(self) -> None:
        """Whole episodes; abandoned where a signal or --time asks to leave, and then to be done after a resume."""
        if self.resolved.eval.every == 0:
            return
        try:
            episodes = self._episodes()
            metrics = {**self._ask("on_evaluation", episodes), **episodes.metrics()}
        except AbandonedError:
            self.evaluation_due = True
            self.look_at_the_clock()
            return
        except UserError:  # training is whole, and nothing of it need be lost
            self.evaluation_due = True
            self.save()
            raise
        self.evaluation_due = False
        numbers = self.logger.write(self.step, self.seconds, "eval", metrics)
        self.evaluations += 1
        self.evaluation_sum += episodes.each().cpu()
        self.logger.say(report.evaluation_line(self, episodes))
        scores = "  ".join(f"{g.name} {numbers[f'return/{g.name}']:.2f}" for g in self.env.spec.groups)
        rate = short(self.step / self.seconds) if self.seconds and self.step else "-"
        self.console.line(f"step {self.step:>10,}  {clock(self.seconds)}  {rate:>6} steps/s  evaluation: {scores}")
        score = numbers[self.score_name]
        if score is not None and score >= self.best:  # of equals the later, which has learnt for longer
            self.check_finite()
            self.best = score
            if self.resolved.save.best != "none":
                self._write("best", self.state_dict())
        if score is not None and self.config.stop_score is not None and score >= self.config.stop_score:
            self.stop(f"the score is {score:.4g}")

    def _episodes(self) -> Episodes:
        e = self.resolved.eval
        how = self.eval_each, self.config.seed, e.sampled
        self.evaluating = True
        try:
            return evaluate(self.eval_env, self.players, *how, longest=e.longest, abandon=self.leaving)
        finally:
            self.evaluating = False

    def save(self, numbered: bool = False) -> None:
        self.check_finite()
        self.folder.refuse_links()
        state = self.state_dict()
        if numbered and self.resolved.save.keep:
            self._write(f"step-{self.step:012d}", state)
            checkpoint.prune(self.folder.checkpoints, self.resolved.save.keep)
        if self.replay is not None:
            count = (self.step - self.trainers[0].since) // self.env.rows
            spans = self.segments.save(self.replay, count)
            state = {**state, "replay": {"count": count, "spans": spans, "state": self.replay_state()}}
        self._write("last", state)
        if self.replay is not None:
            self.segments.prune()
        self.logger.refresh()

    def _write(self, name: str, state: dict[str, Any]) -> None:
        """A checkpoint; and where asked for each net in a file of its own, `nets/<checkpoint>/<group>.<net>.pt`."""
        self.folder.refuse_links()
        folder = self.folder.checkpoints
        if self.resolved.save.nets:
            (folder / "nets").mkdir(exist_ok=True)
            for a in self.learners:
                for net, module in a.nets.items():
                    checkpoint.write(folder / "nets" / name / f"{'+'.join(a.groups)}.{net}.pt", dict(module.state_dict()))
        checkpoint.write(folder / f"{name}.pt", state)

    def tell(self) -> None:
        """What the worlds have to say: a worker was replaced, a row could not be restored."""
        self.eval_env.news[:] = [x for x in self.eval_env.news if x not in self.env.news]
        for env in (self.env, self.eval_env):
            for sentence in env.news:
                self.remark(sentence)
            env.news.clear()

    def remark(self, sentence: str) -> None:
        self.console.line(sentence)
        self.logger.say(sentence)

    def stop(self, why: str) -> None:
        """Save and leave after this iteration."""
        self.stopped = self.stopped or why

    def leaving(self) -> bool:
        """Whether a signal or --time asks to leave, whatever is under way."""
        return self.signal is not None or time.perf_counter() - self.began >= self.limit

    def look_at_the_clock(self) -> None:
        self.seconds = time.perf_counter() - self.began
        if self.seconds >= self.limit:
            self.stop(f"--time {self.config.time} is up")

    def interrupt(self, number: int) -> None:
        """Stop for a signal. An evaluation is abandoned at once, wherever it is: its worlds play no further part."""
        self.signal = number
        self.stop("interrupted" if number == signal.SIGINT else "terminated")
        if self.evaluating:
            raise AbandonedError

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
            "evaluation_due": self.evaluation_due,
            "algorithms": {",".join(a.groups): a.state_dict() for a in self.players.algorithms},
            "collector": self.collector.state_dict(),
            "update_noise": self.update_noise.get_state(),
            "means": self.means.state_dict(),
            "noted": {k: [x.clone() for x in xs] for k, xs in self.noted.items()},
            "lessons": {",".join(x.algorithm.groups): {"since": x.since, "done": x.done} for x in self.trainers},
            "last_train": self.last_train,
            "logs": self.logger.mark() if hasattr(self, "logger") else dict(self.logs_at),
        }

    def load_state_dict(self, state: dict[str, Any], source: str = "last") -> None:
        """Take over what a checkpoint holds, or refuse it in a sentence. Nothing is written."""
        refuse_strange(self, state, f"{source!r} of {self.folder.path}")
        restore_players(self.players, state, str(self.folder.path))
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        self.evaluations, self.last_train = state["evaluations"], state["last_train"]
        self.evaluation_due = state.get("evaluation_due", False)
        self.evaluation_sum.copy_(state["evaluation_sum"])
        self.collector.load_state_dict(state["collector"])
        restore_generator(self.update_noise, state["update_noise"])
        self.means.load_state_dict(state["means"], self.env.device)
        self.noted = {k: list(xs) for k, xs in state["noted"].items()}
        for x in self.trainers:
            told = state.get("lessons", {}).get(",".join(x.algorithm.groups), {"since": 0, "done": 0})  # older files have none
            x.since, x.done = told["since"], told["done"]
        if self.replay is not None and self.branched:
            for x in self.trainers:
                x.restart(self.step)
            most = max(x.start for x in self.trainers)
            self.remarks.append(
                f"The replay begins empty, as only the last checkpoint has one: {most:,} steps fill it, then learning goes on."
            )
        elif self.replay is not None:
            if (told := state.get("replay")) is None:
                raise UserError(
                    f"the last checkpoint of {self.folder.path} names no replay, as only one that was saved as the last does: "
                    "go on with an empty one by --from."
                )
            self.segments.load(self.replay, told["spans"], told["count"])
            self.load_replay_state(told["state"])
            refuse_foreign_actions(self)
            if self.env.begun_anew is not None and self.step:
                break_off(self.replay, self.trainers, self.env.begun_anew)
                self.segments.spans.clear()  # what is on disk goes on as if nothing had happened: it is written anew
        self.restored, self.logs_at = True, state["logs"]

    def _leave_later(self) -> None:
        """Set aside what came after the checkpoint from which the run goes on."""
        moved = self.folder.set_aside(self.step)
        names = [p.stem for p in moved]
        if "best" in names:
            self.best = float("-inf")
        where = (
            f"; what came after it ({', '.join(names)}) is in {moved[0].parent.relative_to(self.folder.path)} now"
            if moved
            else ""
        )
        self.remarks.append(f"Goes on from step {self.step:,}{where}.")

    def replay_state(self) -> dict[str, Any]:
        """What is known of the replay, beside its contents."""
        if self.replay is None:
            return {}
        samplers = {",".join(x.algorithm.groups): x.sampler.state_dict() for x in self.trainers}
        return {"count": self.replay.count.clone(), "samplers": samplers}

    def load_replay_state(self, state: dict[str, Any]) -> None:
        if self.replay is not None:
            self.replay.count.copy_(state["count"])
            for x in self.trainers:
                x.sampler.load_state_dict(state["samplers"][",".join(x.algorithm.groups)])

    @property
    def segments(self) -> Segments:
        """Where the replay's contents are kept."""
        if not hasattr(self, "_segments"):
            self._segments = Segments(self.folder.checkpoints / "replay")
        return self._segments

    # --- inside ---

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, dtype=torch.float64, generator=self.update_noise, device=self.env.device)

    def _shaped(self, shaper: Shaper, reward: Tensor, obs: Any, group: str) -> Tensor:
        shaped = shaper(reward.clone(), tree_map(torch.clone, obs), self.now, self.config.steps)  # they are the batch's own
        if not isinstance(shaped, Tensor) or shaped.shape != reward.shape:
            gave = list(shaped.shape) if isinstance(shaped, Tensor) else type(shaped).__name__
            raise UserError(f"the shaper of {group!r} gave {gave} for rewards of {list(reward.shape)}: it must give as many.")
        return shaped

    def _due(self, before: int, every: int | str, share: int) -> bool:
        """Whether this iteration crossed a multiple of `every`, or ended the run. Host counts alone decide."""
        if every == 0:
            return False
        every = max(self.config.steps // share, 1) if every == "auto" else int(every)
        return self.step // every > before // every or self.step >= self.config.steps

    def _note(self, moment: str) -> None:
        """Ask the hooks, and keep what they want logged for the next line."""
        for k, x in self._ask(moment).items():
            self.noted.setdefault(k, []).append(x)

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
        if not (folder / "train.log").stat().st_size:  # new, or cut back to before its first checkpoint
            logger.say(report.header(self))
        return logger


def shapers_of(learners: Sequence[Algorithm], given: Shapers, groups: list[str]) -> dict[str, Shaper]:
    """Group -> the user's own shaper of its rewards: one that was handed over, or the one that its settings name."""
    handed = given if isinstance(given, dict) else {} if given is None else dict.fromkeys(groups, given)
    for g in handed:
        if g not in groups:
            raise UserError(f"there is no group {g!r} here{near(g, groups)}: it has {', '.join(groups)}.")
    out = {}
    for a in learners:
        name = getattr(a.config, "shaper", None)
        for g in a.groups:
            if g in handed and name is None:
                raise UserError(f"the rewards of {g!r} were not shaped when this run began, and a run keeps its pay.")
            if g in handed:
                out[g] = handed[g]
            elif name is not None and name.startswith(PYTHON):
                raise UserError(
                    f"the rewards of {g!r} are shaped by a function that no import finds, {name.removeprefix(PYTHON)}: hand it "
                    "over again, as in shoal.resume(run, shaper=...)."
                )
            elif name is not None:
                out[g] = own_object(name, "--algo.shaper")
    return out


def try_shapers(loop: Loop) -> None:
    """Ask every shaper once, of nothing, before a folder is made."""
    for g, shaper in loop.shapers.items():
        seen = tree_map(lambda x: x[None], loop.collector.frame[g].obs)
        try:
            loop._shaped(shaper, torch.zeros(1, loop.env.rows, loop.env.spec[g].n, device=loop.env.device), seen, g)
        except UserError:
            raise
        except Exception as e:  # whatever the user's function does
            raise UserError(f"the shaper of {g!r} failed on (reward, obs, step, steps): {type(e).__name__}: {e}.") from e


@contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM are handed to `act`, once; the second stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def catch(number: int, _: Any) -> None:
        if caught:
            raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt
        caught.append(number)
        act(number)

    before = {s: signal.signal(s, catch) for s in SIGNALS}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def resume(
    path: str | Path,
    steps: int | None = None,
    hooks: Sequence[Hook] = (),
    quiet: bool = False,
    device: str | None = None,
    shaper: Shapers = None,
    source: str = "last",
) -> Loop:
    """The loop of a run as it was at its last checkpoint, or at its beginning where it has none yet. `source` is another
    checkpoint to go on from: best, a step's number, or a file."""
    run = Run(path)
    resolved = run.resolve(device)
    if source == "last" and not (run.checkpoints / "last.pt").exists():
        run.refuse_lost()
        state = None
    else:
        state = run.load(source)
    expected = slug(run.settings.env), slug(run.settings.algo)
    if state is not None and (state["env"], state["algo"]) != expected:
        raise UserError(
            f"the checkpoint {source!r} of {path} is of {state['algo']} on {state['env']}, and the run is of "
            f"{expected[1]} on {expected[0]}."
        )
    done = state["step"] if state else 0
    if steps is not None and steps <= done:
        raise UserError(f"--steps is {steps} and the run has done {done} already: it sets a new total.")
    changed: dict[str, Any] = {"until": None, "time": None, "quiet": quiet}  # what an earlier call asked for itself
    changed.update({} if steps is None else {"steps": steps})
    config = dataclasses.replace(resolved.run, **changed)
    resolved = dataclasses.replace(resolved, run=config)
    if state is None:
        return begin(run, resolved, hooks, shaper)
    loop = Loop(resolved, hooks, run, shaper)
    loop.branched = source != "last"
    loop.remarks += checkpoint.age_of(run.find(source))
    loop.load_state_dict(state, source)
    return loop


def begin(run: Run, resolved: Resolved, hooks: Sequence[Hook] = (), shaper: Shapers = None) -> Loop:
    """The loop of a run that has no checkpoint yet: its players are made anew, of its own seed."""
    loop = Loop(resolved, hooks, shaper=shaper)
    loop.folder = run
    return loop
