"""CUDA graphs: capture work once, replay it with a single launch.

`training/speedup.py` says which work of a loop is captured, and which of its tensors and generators a graph needs.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

IN_FLIGHT = 2  # replays that the device may be behind the host


def capture(
    work: Callable[[], object], stream: torch.cuda.Stream, generators: Iterable[torch.Generator] = ()
) -> torch.cuda.CUDAGraph:
    """Capture `work` on a stream of its own. The generators are registered, so that a replay draws the numbers that the same
    code would have drawn eagerly."""
    graph = torch.cuda.CUDAGraph()
    for g in generators:
        graph.register_generator_state(g)
    with uncollected(), torch.cuda.graph(graph, stream=stream):
        work()
    return graph


class Launcher:
    """Replays graphs, and waits where the device would fall more than `IN_FLIGHT` replays behind the host."""

    def __init__(self) -> None:
        self.events: deque[torch.cuda.Event] = deque()

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        if len(self.events) >= IN_FLIGHT:
            self.events.popleft().synchronize()
        graph.replay()
        event = torch.cuda.Event()
        event.record()
        self.events.append(event)


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python collects no garbage: a graph among it, left by an earlier loop, would break the capture."""
    on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
