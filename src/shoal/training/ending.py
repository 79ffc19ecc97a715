"""A run's end: its last weights beside its best, on fresh episodes. A run that fell says so.

`best.pt` is the luckiest of many evaluations: it is played once more, and so is the last, on the same episodes that neither
training nor an evaluation saw: as many as an evaluation has, in worlds of tensors at least a hundred. Nothing is touched that
a resumed run goes on from: the last checkpoint is written before, and the sentence comes after it in the logs, where a resumed
run cuts them off.
"""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.envs.base import World
from shoal.ops.student import t_quantile
from shoal.spec import UserError
from shoal.training.evaluate import AbandonedError, Episodes, rows_for
from shoal.training.players import frozen_players
from shoal.training.seeds import global_seed, seed_of

if TYPE_CHECKING:
    from shoal.training.loop import Loop

ENOUGH = 100  # episodes in worlds of tensors; those of other libraries play as many as an evaluation has
FALL = 0.05  # share of what was learnt up to the best that must be lost to be named


def compare_with_best(loop: Loop) -> None:
    """Say so where the last weights are worse than the best beyond both intervals. Nothing is compared in a run that was
    stopped, whose best is its last, or that has none; a signal or --time ends it in the middle."""
    asked = loop.resolved.eval.recheck and loop.resolved.eval.every != 0 and loop.resolved.save.best != "none"
    if not asked or not loop.learners or loop.stopped is not None or loop.step < loop.config.steps:
        return
    if not (loop.folder.checkpoints / "best.pt").exists():
        return
    try:
        step = loop.folder.load("best")["step"]
        if step < loop.step and (sentence := _fall(loop, step)) is not None:
            loop.record("ending", sentence)
    except AbandonedError:
        if loop.signal is None:
            loop.remark(f"The end was not compared with the best: --time {loop.config.time} is up.")
    except UserError as e:  # training is done, and nothing of it is lost
        loop.remark(f"The end was not compared with the best: {str(e).rstrip('.')}.")


def _fall(loop: Loop, step: int) -> str | None:
    """How far the run fell since its best, of this step; none where that is not sure."""
    last, best = _fresh_episodes(loop)
    track = last.per_episode().get(loop.score_name), best.per_episode().get(loop.score_name)
    if track[0] is None or track[1] is None:  # the metric is of all episodes together
        return None
    (now, now_half), (then, then_half) = mean_and_interval(track[0]), mean_and_interval(track[1])
    first = [e[loop.score_name] for e in loop.folder.evaluations() if e.get(loop.score_name) is not None]
    learnt = max(then - first[0], 0.0) if first else 0.0
    if not now + now_half < then - then_half or then - now <= FALL * learnt:
        return None
    steady = any(getattr(a.config, "lr_schedule", "") == "constant" for a in loop.learners)
    rate = "a falling learning rate (--algo.lr-schedule linear)" if steady else "a smaller learning rate (--algo.lr)"
    way = f"{rate} may keep it" if step else "it has learnt nothing yet, and wants more steps or other settings"
    return (
        f"The run ends far below its best: {loop.score_name} is {now:.4g} ± {now_half:.2g} at step {loop.step:,} and was "
        f"{then:.4g} ± {then_half:.2g} at step {step:,}, each over {len(last.lengths)} fresh episodes (95 % intervals). "
        f"Play the best by `shoal eval {shlex.quote(str(loop.folder.path))} --checkpoint best`; {way}."
    )


def _fresh_episodes(loop: Loop) -> list[Episodes]:
    """Of the last checkpoint's policies, and of the best's: both have the same starts and draws."""
    env, each = loop.eval_env, loop.eval_each
    own = isinstance(env, World) and env.rows * each < ENOUGH
    if own:
        rows, each = rows_for(ENOUGH, env.widest)
        env = loop.resolved.make_env(rows)
    try:
        with global_seed(loop.config.seed, "ending", device=env.device):
            players = [frozen_players(loop.folder, env.spec, env.device, which, {}) for which in ("last", "best")]
            return [loop.play_episodes(env, p, each, seed_of(loop.config.seed, "ending")) for p in players]
    finally:
        if own:
            env.close()


def mean_and_interval(x: Tensor) -> tuple[float, float]:
    """The mean of independent numbers, and half of its 95 % interval: Student's, infinite of one number."""
    n = len(x)
    if n < 2:
        return float(x.mean()), math.inf
    return float(x.mean()), t_quantile(n - 1) * float(x.double().std(correction=1)) / math.sqrt(n)
