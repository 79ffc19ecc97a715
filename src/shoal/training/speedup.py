"""Kernels and graphs, as `--compile` asks: iterations and updates without Python between their operations, to the same bits.
What cannot be had is a remark, and is done without.

`Captured` is for CUDA: an iteration is captured once as a CUDA graph (`kernels/graph.py`), and replayed with a single launch.
Everything an iteration reads and writes keeps its address. What it carries over in new tensors (the world's state, the frame to
act on, memory) is copied into tensors of the graph at its end. Other tensors that were put in their place, by restoring a
checkpoint say, are copied in before a replay. The warm-up that a capture needs is undone.

`Recorded` is for the CPU: an update from a replay buffer is recorded once (`kernels/recording.py`), and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shoal.algos.base import Algorithm
from shoal.envs.base import World
from shoal.envs.workers import cores
from shoal.kernels import native, recording, triton
from shoal.kernels.compiler import keep_memory
from shoal.kernels.graph import Launcher, capture
from shoal.kernels.recording import Recording
from shoal.ops.kernels import for_device
from shoal.training.offpolicy import OffPolicyTrainer
from shoal.training.settings import RunConfig, most_compiled
from shoal.training.state import load_replay_state, replay_state
from shoal.tree import tree_leaves, tree_map

if TYPE_CHECKING:
    from shoal.training.loop import Loop


def set_backends(config: RunConfig, device: torch.device) -> bool:
    """Set PyTorch's threads and ours, and the precision of products, by which nets choose their kernels. Returns whether
    algorithms are to take Shoal's own kernels."""
    fused = config.compile == "fused"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.matmul == "tf32"
    torch.backends.cudnn.deterministic = True  # convolutions that add up in any order would not repeat
    torch.set_num_threads(1 if fused and device.type == "cpu" else config.threads or 1)  # PyTorch's spin while they wait
    native.share(config.threads or cores())
    keep_memory()
    return fused and for_device(device).why_not() is None


def speed_up(loop: Loop) -> None:
    """Capture iterations and updates, or record updates, and fuse the worlds' steps."""
    mode, cuda = loop.config.compile, loop.env.device.type == "cuda"
    native_world = isinstance(loop.env, World)
    if mode != "off" and cuda and native_world:
        loop.on_device = Captured(loop, loop.collect_and_update, partial(setattr, loop, "on_device"))
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


class Captured:
    """`work`, an iteration of a loop or an update alone, as CUDA graphs. Work that steps the world (`plays`) has a graph for
    each phase of the world in which it can start; an update has one graph. A loop on a stream of its own captures and
    replays there. Where the work cannot be captured, `instead` is called with it."""

    def __init__(self, loop: Loop, work: Callable[[], None], instead: Callable[[Callable[[], None]], None], plays: bool = True):
        self.loop, self.work, self.env, self.instead, self.plays = loop, work, loop.env, instead, plays
        if plays:
            assert isinstance(self.env, World)
            self.env.hold(loop.rollout)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, int]] = {}  # phase before -> graph, phase after
        self.carried: Any = None  # tensors that the graphs read from and write to
        self.launcher = Launcher()
        self.side = torch.cuda.Stream(self.env.device)  # to capture on: its workspaces are used by no other graph

    def prepare(self) -> bool:
        """Capture the graph that the next call replays. False where that fails: the loop runs eagerly, and a remark says so."""
        phase = self._phase
        if phase not in self.graphs:
            before = self._snapshot()
            try:
                self.graphs[phase] = self._capture(before)
            except RuntimeError as e:
                device = self.env.device  # a generator that was registered with a failed capture no longer draws
                self.loop.collector.generator, self.loop.update_noise = torch.Generator(device), torch.Generator(device)
                for one in (self.loop.on_device, *self.loop.on_device_updates):
                    if isinstance(one, Captured):
                        one.graphs.clear()  # they draw from the old generators
                self._restore(before)
                reason = next((line for line in str(e).splitlines() if line), type(e).__name__).rstrip(".")
                self.loop.remark(f"Iterations cannot be captured as a CUDA graph, and run eagerly: {reason}.")
                self.instead(self.work)
                return False
        return True

    @property
    def _phase(self) -> int:
        return self.env.phase if self.plays else 0

    def __call__(self) -> None:
        if not self.prepare():
            return self.work()
        graph, after = self.graphs[self._phase]
        self._carry_in()
        self.launcher.replay(graph)
        if self.plays:
            self.env.phase = after

    def _capture(self, before: Any) -> tuple[torch.cuda.CUDAGraph, int]:
        if self.loop.config.compile == "fused":
            with triton.compiling_ahead():
                self.work()
            self._restore(before)
        start = self._current()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # libraries initialise, and tensors that are made lazily are made
            self.work()
        torch.cuda.current_stream().wait_stream(self.side)
        if self.carried is None:  # a tensor that is the same object after an iteration is a constant
            self.carried = tree_map(lambda x, y: x if x is y else x.clone(), start, self._current())
        self._restore(before)
        self._carry_in()
        graph = capture(self._work_and_carry, self.side, (self.loop.collector.generator, self.loop.update_noise))
        after = self._phase
        self._restore(before)
        return graph, after

    def _work_and_carry(self) -> None:
        self.work()
        self._copy_carried()

    def _carry_in(self) -> None:
        """Copy in tensors that have taken the place of the carried ones since the last replay, as a restored state does."""
        if self._copy_carried():
            collector = self.loop.collector
            self.env.state, collector.frame, collector.memory = self.carried

    def _copy_carried(self) -> bool:
        """Copy what the loop has now into the carried tensors; whether there was anything to copy."""
        pairs = zip(tree_leaves(self.carried), tree_leaves(self._current()), strict=True)
        others = [(mine, x) for mine, x in pairs if mine is not x]
        for mine, x in others:
            mine.copy_(x)
        return bool(others)

    def _current(self) -> Any:
        """What an iteration carries over in new tensors: the world's state, the frame to act on, memory."""
        return (self.env.state, self.loop.collector.frame, self.loop.collector.memory) if self.plays else ()

    def _snapshot(self) -> Any:
        """All that the work changes, except what it writes into a replay buffer: the first launch overwrites that."""
        loop = self.loop
        learnt = [tree_map(torch.clone, dict(a.state_dict())) for a in loop.players.algorithms]
        played = (loop.collector.state_dict(), self.env.phase) if self.plays else None
        noise = loop.collector.generator.get_state(), loop.update_noise.get_state()
        return learnt, replay_state(loop), played, noise, loop.means.state_dict(), loop.overestimation.state_dict()

    def _restore(self, snapshot: Any) -> None:
        loop = self.loop
        learnt, replay, played, noise, means, limits = snapshot
        for a, state in zip(loop.players.algorithms, learnt, strict=True):
            a.load_state_dict(state)
        load_replay_state(loop, replay)
        loop.collector.generator.set_state(noise[0])
        loop.update_noise.set_state(noise[1])
        loop.means.load_state_dict(means, self.env.device)
        loop.overestimation.load_state_dict(limits)
        if played is not None:
            loop.collector.load_state_dict(played[0])
            self.env.phase = played[1]


class Recorded:
    """The updates of a trainer, with a recording for each variant of its update. The first update of a variant runs plainly, so
    that what is made lazily is made; the second is recorded; later ones are replayed. The loop calls all of `works`, of which
    this is the `k`-th. Where an update cannot be recorded, the trainer itself takes that place, and a `remark` says why."""

    def __init__(self, trainer: OffPolicyTrainer, works: list[Callable[[], None]], k: int, remark: Callable[[str], None]):
        self.trainer, self.works, self.k, self.remark = trainer, works, k, remark
        self.recordings: dict[int, Recording | None] = {}  # variant -> none: it ran once

    def __call__(self) -> None:
        variant = self.trainer.algorithm.variant()
        if (made := self.recordings.get(variant)) is not None:
            return made.replay()
        if variant not in self.recordings:
            self.recordings[variant] = None
            return self.trainer.update_once()
        others = [r for x in self.works if isinstance(x, Recorded) for r in x.recordings.values() if r is not None]
        with Recording(recording.MOST - sum(r.bytes for r in others)) as made:
            self.trainer.update_once()
        if made.broken is None:
            self.recordings[variant] = made
        else:
            self.works[self.k] = self.trainer
            self.remark(f"Updates cannot be recorded, and run operation by operation: {made.broken}.")


def ours(algorithms: Iterable[Algorithm]) -> bool:
    """Whether updates run no code of the user's, which may read numbers out of tensors without a recording noticing it."""
    own = ("normaliser", "state_normaliser")
    return all(
        type(a).__module__.startswith("shoal.") and a.net.module is None and not any(getattr(a.config, k, None) for k in own)
        for a in algorithms
    )
