"""Kernels and graphs, as `--compile` asks. What cannot be had is a remark, and is done without."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from shoal.envs.base import World
from shoal.ops import native
from shoal.ops.compiler import cores, keep_memory
from shoal.ops.kernels import for_device
from shoal.training.graph import Captured
from shoal.training.recording import Recorded, ours
from shoal.training.settings import RunConfig, most_compiled

if TYPE_CHECKING:
    from shoal.training.loop import Loop


def set_threads(config: RunConfig, device: torch.device) -> bool:
    """Set PyTorch's threads and ours. Returns whether algorithms are to take Shoal's own kernels."""
    fused = config.compile == "fused"
    torch.set_num_threads(1 if fused and device.type == "cpu" else config.threads or 1)  # PyTorch's spin while they wait
    native.share(config.threads or cores())
    keep_memory()
    return fused and for_device(device).why_not() is None


def speed_up(loop: Loop) -> None:
    """Capture iterations and updates, or record updates, and fuse the worlds' steps."""
    mode, cuda = loop.config.compile, loop.env.device.type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = loop.config.matmul == "tf32"
    torch.backends.cudnn.deterministic = True  # convolutions that add up in any order would not repeat
    native_world = isinstance(loop.env, World)
    if mode != "off" and cuda and native_world:
        loop.on_device = Captured(loop, loop.iteration, partial(setattr, loop, "on_device"))
        loop.eval_env.hold(loop.rollout)  # it takes the same kernels
    updates = loop.on_device_updates  # what cannot be captured, or recorded, puts the plain trainer back here
    for k, trainer in enumerate(loop.trainers if mode != "off" else ()):
        if cuda:
            updates[k] = Captured(loop, trainer, partial(updates.__setitem__, k), plays=False)
        elif not loop.hooks.hooks and ours(loop.players.algorithms if trainer.algorithm.needs_peers else [trainer.algorithm]):
            updates[k] = Recorded(trainer, updates, k, loop.remark)
    if mode == "graph" and not cuda and most_compiled(loop.env.device) == "graph":
        loop.remarks.append("Nothing is compiled: there is no C compiler; with cc, gcc or clang the CPU trains faster.")
    elif mode == "graph" and not cuda and not loop.trainers:
        loop.remarks.append("Nothing is captured: on the CPU updates from a replay are, and nobody here learns from one.")
    if mode == "fused":
        reasons = {loop.env.fuse(), loop.eval_env.fuse()} if native_world else set()
        loop.remarks += [why for why in (*reasons, for_device(loop.env.device).why_not()) if why]
