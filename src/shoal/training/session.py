"""A run's folder while a process trains it: locked, its logs open; however training ends, nothing stays open."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shoal.flags import parse_span
from shoal.log import report
from shoal.log.console import Display, Progressor
from shoal.log.logger import Logger, cut
from shoal.spec import NotFiniteError, StoppedError, UserError
from shoal.training import trust
from shoal.training.diverged import DivergedError, explained
from shoal.training.speedup import Captured
from shoal.training.state import set_later_aside

if TYPE_CHECKING:
    from shoal.training.loop import Loop


@contextmanager
def session(loop: Loop, goal: int, console: Display | None) -> Iterator[None]:
    """Inside, the loop has a logger and a console. An error of the user's, or of the world's, is logged and told."""
    lock = loop.folder.lock()
    trust.sign(loop.folder.path)
    if loop.branched:
        set_later_aside(loop)
    cut(loop.folder.path, loop.logs_at)
    if loop.folder.settings.run["steps"] != loop.config.steps:
        loop.folder.set_steps(loop.config.steps)
    limit = parse_span(loop.config.time, "--time")
    loop.began, loop.limit = time.perf_counter() - loop.seconds, math.inf if limit is None else limit
    loop.logger = _open_log(loop)
    loop.console = console or Progressor(loop.config.steps, loop.step, loop.config.quiet)
    try:
        log = (loop.folder.path / "train.log").read_text(errors="replace").splitlines()
        for remark in loop.remarks:
            loop.console.line(remark)
            if remark not in log:  # that of a resumed run has it already
                loop.logger.say(remark)
        if isinstance(loop.on_device, Captured) and loop.step < goal:
            loop.on_device.prepare()  # before the first evaluation: its kernels are compiled with the others
        yield
        if loop.stopped and loop.signal is None:
            loop.logger.say(f"Stopped: {loop.stopped}.")
    except DivergedError as e:
        loop.logger.say(f"Diverged: {e}")
        raise
    except NotFiniteError as e:
        if loop.not_finite is None and not e.diverged:  # the rollout that it was in never began
            loop.save()
        stopped = explained(loop, e)
        loop.logger.say(f"{'Diverged' if isinstance(stopped, DivergedError) else 'Stopped'}: {stopped}")
        raise stopped from None
    except UserError as e:
        loop.logger.say(f"Stopped: {e}")
        raise StoppedError(str(e)) from e
    finally:
        loop.env.close()
        loop.eval_env.close()
        loop.console.close()
        loop.logger.close()
        lock.close()


def _open_log(loop: Loop) -> Logger:
    folder, settings = loop.folder.path, loop.resolved.settings
    new = not (folder / "train.log").exists()
    plain = {"algo": settings.algo, "env": settings.env, **settings.run, **settings.sections}
    logger = Logger(folder, loop.resolved.log, "/".join(folder.parts[-3:]), plain, None if new else loop.step)
    if not (folder / "train.log").stat().st_size:  # new, or cut back to before its first checkpoint
        logger.say(report.header(loop.resolved, folder, loop.env, loop.players.algorithms, loop.shaping.shapers))
    return logger
