"""Numbers that are not finite: found where they arise, and told in a sentence before anything is written."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.envs.base import Environment
from shoal.spec import Batch, Box, Frame, NotFiniteError, View
from shoal.tree import tree_leaves

NEVER = torch.iinfo(torch.long).max
KINDS = ("observation", "state", "action", "reward", "observation", "state")  # in the order in which they come about


class FirstNotFinite:
    """Where a world's numbers were first infinite or NaN, kept on the device: nothing is read until `found` looks. What agents
    that are not alive see and do may be anything."""

    def __init__(self, env: Environment):
        self.spec = env.spec
        self.first = {g.name: torch.full((env.rows, g.n), NEVER, device=env.device) for g in env.spec.groups}

    def note(self, batch: Batch, steps: Tensor) -> None:
        """What happened in the `steps` [T]. On a CPU it is looked at in passing, and nothing more is done where all is well."""
        seen = tree_leaves((batch.frame, batch.actions, batch.results, batch.next))
        if steps.device.type != "cpu" or not all(math.isfinite(float(x.sum())) for x in seen if x.is_floating_point()):
            self._locate(batch, steps)

    def _locate(self, batch: Batch, steps: Tensor) -> None:
        """Waits for no device and reads nothing."""
        for g in self.spec.groups:
            now, then, result = batch.frame[g.name], batch.next[g.name], batch.results[g.name]
            acted = _size(batch.actions[g.name]).where(now.alive, 0) if isinstance(g.action, Box) else None
            reward = result.reward if result.shaping is None else result.reward + result.shaping
            sizes = (_seen(now), _state(batch.frame), acted, reward, _seen(then), _state(batch.next))
            for kind, x in enumerate(sizes):
                if x is not None:  # [T, B, N], or of the state [T, B, 1]
                    when = (steps[:, None, None] * len(KINDS) + kind).where(~x.isfinite(), NEVER).amin(0)
                    torch.minimum(self.first[g.name], when, out=self.first[g.name])

    def found(self, of_what: str = "") -> NotFiniteError | None:
        """The first of them, in words; none where all were finite. The steps are those `of_what`."""
        name, first = min(((g, x) for g, x in self.first.items()), key=lambda item: int(item[1].min()))
        if (when := int(first.min())) == NEVER:
            return None
        row, agent = divmod(int(first.argmin()), first.shape[1])
        step, kind = when // len(KINDS), KINDS[when % len(KINDS)]
        of = f" of {self.spec[name].agents[agent]}" if kind != "state" else ""
        return NotFiniteError(f"the {kind}{of} in row {row} is not finite at step {step:,}{of_what}", diverged=kind == "action")


def _seen(view: View) -> Tensor | None:
    """[T, B, N] finite where all is that an agent sees; none where those are whole numbers."""
    sizes = [_size(x) for x in tree_leaves(view.obs) if x.is_floating_point()]
    return torch.stack(sizes).amax(0).where(view.alive, 0) if sizes else None


def _state(frame: Frame) -> Tensor | None:
    return None if frame.state is None else _size(frame.state[:, :, None])  # [T, B, 1]


def _size(x: Tensor) -> Tensor:
    """The largest magnitude of each agent's numbers, [T, B, N, ...] -> [T, B, N]."""
    flat = x.flatten(3) if x.dim() > 3 else x[..., None]
    return torch.linalg.vector_norm(flat, torch.inf, -1) if flat.shape[-1] else flat.sum(-1)
