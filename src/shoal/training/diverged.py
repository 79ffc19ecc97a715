"""What is said, and raised, where training met a number that is not finite."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import torch

from shoal.algos.optimiser import Optimiser
from shoal.ids import slug
from shoal.spec import NotFiniteError, StoppedError, UserError

if TYPE_CHECKING:
    from shoal.training.loop import Loop


class DivergedError(RuntimeError):
    """A loss, or an action, was not finite. The last checkpoint, where there is one, is good."""


def check_finite(loop: Loop) -> None:
    """Asked before anything is written: a number of the world's, a gradient or a weight that was not finite."""
    if loop.not_finite is not None and (first := loop.not_finite.found()) is not None:
        raise first
    if loop.shaping.shapers and bool(loop.shaping.not_finite):
        again = start_again(loop, "once it is mended")
        raise StoppedError(
            f"a shaper gave a reward that is not finite before step {loop.step:,}, and training stopped; {again}."
        )
    sound = [~m.broken for a in loop.learners for m in a.modules() if isinstance(m, Optimiser)]
    sound += [x.isfinite().all() for a in loop.learners for x in a.state_dict().values() if x.is_floating_point()]
    if sound and not bool(torch.stack(sound).all()):
        raise diverged(loop, f"a loss was not finite before step {loop.step:,}")


def diverged(loop: Loop, what: str) -> DivergedError:
    rates = [f"{a.config.lr:g}" for a in loop.learners if getattr(a.config, "lr", None)]
    smaller = "a smaller learning rate" + (f", --algo.lr below {rates[0]}" if rates else "")
    return DivergedError(f"{what}, and training stopped; {start_again(loop, f'with {smaller}')}.")


def explained(loop: Loop, e: NotFiniteError) -> UserError | DivergedError:
    """What to say where training met a number of the world's, or an action, that is not finite."""
    if e.diverged:
        return diverged(loop, str(e))
    env = loop.resolved.settings.env
    return StoppedError(
        f"{slug(env)} gave a number that is not finite, and training stopped: {e}. `shoal check "
        f"{shlex.quote(env)}` looks a world over; {start_again(loop, 'once it is mended')}."
    )


def start_again(loop: Loop, how: str) -> str:
    """A run cannot be resumed with other settings, but its weights can be the beginning of another one."""
    last, run = loop.folder.checkpoints / "last.pt", shlex.quote(str(loop.folder.path))
    if not last.exists():
        return f"there is no checkpoint yet: start anew {how}"
    return f"the last good checkpoint is {last}: start from its weights with --init {run} {how}"
