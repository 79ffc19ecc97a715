"""Starting a run, and going on with one: the loop as it was at a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.ids import slug
from shoal.spec import UserError
from shoal.training import checkpoint
from shoal.training.hooks import Hook
from shoal.training.loop import Loop
from shoal.training.run import Run
from shoal.training.settings import Resolved
from shoal.training.shapers import Shapers
from shoal.training.state import load_loop_state


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
    load_loop_state(loop, state, source)
    return loop


def begin(run: Run, resolved: Resolved, hooks: Sequence[Hook] = (), shaper: Shapers = None) -> Loop:
    """The loop of a run that has no checkpoint yet: its players are made anew, of its own seed."""
    loop = Loop(resolved, hooks, shaper=shaper)
    loop.folder = run
    return loop
