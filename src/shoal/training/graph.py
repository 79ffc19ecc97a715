"""Iterations on CUDA as one graph: captured once, replayed with a single launch.

Everything an iteration reads and writes keeps its address. What it carries over in new tensors (the world's state, the frame
to act on, memory) is copied into tensors of the graph's own at its end; what somebody else put in their place, by
restoring a checkpoint say, is copied in before a replay. Generators are registered, so that a replay draws what the same
code would have drawn eagerly. The warm-up that capturing needs is undone.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.envs.base import World
from shoal.kernels import triton
from shoal.spec import tree_leaves, tree_map

IN_FLIGHT = 2  # iterations that the device may be behind the host


@contextmanager
def uncollected() -> Iterator[None]:
    """Python collects no garbage meanwhile: a graph among it, left by an earlier loop, would break the capture under way."""
    on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


class Captured:
    """`work`, an iteration of a loop or a part of one, as a graph for each phase of the world that it begins in; or, of what
    does not `play`, one graph. A loop on a stream of its own captures and replays there. `instead` is called with the work
    where it cannot be captured."""

    def __init__(self, loop: Any, work: Callable[[], None], instead: Callable[[Callable[[], None]], None], plays: bool = True):
        self.loop, self.work, self.env, self.instead, self.plays = loop, work, loop.env, instead, plays
        if plays:
            assert isinstance(self.env, World)
            self.env.hold(loop.rollout)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, int]] = {}  # phase before -> graph, phase after
        self.carried: Any = None  # tensors of the graphs' own
        self.flying: deque[torch.cuda.Event] = deque()
        self.side = torch.cuda.Stream(self.env.device)  # to capture on: with it come workspaces that no other graph uses

    def prepare(self) -> bool:
        """Capture what the next call replays; false where that cannot be done, and the loop is told to go on eagerly."""
        phase = self._phase
        if phase not in self.graphs:
            before = self._snapshot()
            try:
                self.graphs[phase] = self._capture(before)
            except RuntimeError as e:
                device = self.env.device  # a generator that was registered with a failed capture draws no more
                self.loop.collector.generator, self.loop.update_noise = torch.Generator(device), torch.Generator(device)
                for one in (self.loop.on_device, *self.loop.on_device_lessons):
                    if isinstance(one, Captured):
                        one.graphs.clear()  # they draw from the generators of before
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
        self._settle()
        if len(self.flying) >= IN_FLIGHT:
            self.flying.popleft().synchronize()
        graph.replay()
        if self.plays:
            self.env.phase = after
        event = torch.cuda.Event()
        event.record()
        self.flying.append(event)

    def _capture(self, before: Any) -> tuple[torch.cuda.CUDAGraph, int]:
        if self.loop.config.compile == "fused":
            with triton.compiling_ahead():
                self.work()
            self._restore(before)
        moving = self._moving()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # libraries set themselves up, lazily made tensors are made
            self.work()
        torch.cuda.current_stream().wait_stream(self.side)
        if self.carried is None:  # what is the same object after an iteration is a constant
            self.carried = tree_map(lambda x, y: x if x is y else x.clone(), moving, self._moving())
        self._restore(before)
        self._settle()
        graph = torch.cuda.CUDAGraph()
        for g in (self.loop.collector.generator, self.loop.update_noise):
            graph.register_generator_state(g)
        with uncollected(), torch.cuda.graph(graph, stream=self.side):
            self.work()
            self._bring_in()
        after = self._phase
        self._restore(before)
        return graph, after

    def _settle(self) -> None:
        """Whatever was put in the place of the graphs' own tensors since the last replay is copied into them."""
        if self._bring_in():
            collector = self.loop.collector
            self.env.state, collector.frame, collector.memory = self.carried

    def _bring_in(self) -> bool:
        pairs = zip(tree_leaves(self.carried), tree_leaves(self._moving()), strict=True)
        strange = [(mine, x) for mine, x in pairs if mine is not x]
        for mine, x in strange:
            mine.copy_(x)
        return bool(strange)

    def _moving(self) -> Any:
        return (self.env.state, self.loop.collector.frame, self.loop.collector.memory) if self.plays else ()

    def _snapshot(self) -> Any:
        """All that the work changes. What it writes into a replay is written over by its first replay."""
        loop = self.loop
        learnt = [tree_map(torch.clone, dict(a.state_dict())) for a in loop.players.algorithms]
        played = (loop.collector.state_dict(), self.env.phase) if self.plays else None
        noise = loop.collector.generator.get_state(), loop.update_noise.get_state()
        return learnt, loop.replay_state(), played, noise, loop.means.state_dict()

    def _restore(self, snapshot: Any) -> None:
        loop = self.loop
        learnt, replay, played, noise, means = snapshot
        for a, state in zip(loop.players.algorithms, learnt, strict=True):
            a.load_state_dict(state)
        loop.load_replay_state(replay)
        loop.collector.generator.set_state(noise[0])
        loop.update_noise.set_state(noise[1])
        loop.means.load_state_dict(means, self.env.device)
        if played is not None:
            loop.collector.load_state_dict(played[0])
            self.env.phase = played[1]
