"""What a person sees while runs go on: a bar in a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol


class Display(Protocol):
    """What a loop tells of itself while it runs."""

    def advance(self, step: int, rate: float) -> None: ...
    def scores(self, numbers: dict[str, Any], groups: list[str]) -> None: ...
    def line(self, text: str) -> None: ...
    def close(self) -> None: ...


class Terminal:
    """A bar with what stands beside it, and lines above it."""

    def __init__(self, what: str, total: int, done: int, quiet: bool):
        self.quiet, self.live = quiet, not quiet and sys.stdout.isatty()
        self.bar: Any = None
        if self.live:
            from rich.console import Console  # only where there is a bar to draw
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            self.console = Console(file=sys.stdout, highlight=False)
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("[cyan]{task.fields[scores]}"),
                console=self.console,
            )
            self.task = self.bar.add_task(what, total=total, completed=done, rate="", scores="")
            self.bar.start()

    def show(self, **fields: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.task, **fields)

    def line(self, text: str) -> None:
        if self.live:
            self.console.print(text, markup=False, soft_wrap=True)
        elif not self.quiet:
            try:
                print(text, flush=True)
            except BrokenPipeError:  # whoever read us went away: the run goes on, and says no more
                self.quiet = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


class Progressor:
    """The display of one run."""

    def __init__(self, total: int, done: int, quiet: bool):
        self.terminal = Terminal("training", total, done, quiet)

    def advance(self, step: int, rate: float) -> None:
        self.terminal.show(completed=step, rate=f"{short(rate)} steps/s")

    def scores(self, numbers: dict[str, Any], groups: list[str]) -> None:
        """Show the groups' returns beside the bar."""
        shown = {g: numbers[f"return/{g}"] for g in groups if numbers.get(f"return/{g}") is not None}
        self.terminal.show(scores="  ".join(f"{g} {x:.2f}" for g, x in shown.items()))

    def line(self, text: str) -> None:
        self.terminal.line(text)

    def close(self) -> None:
        self.terminal.close()


class Board:
    """One bar for several runs that differ by the seed: how far they are on average and the slowest of them, what they do
    together in a second, the mean of their scores. Every line says whose it is."""

    def __init__(self, steps: dict[int, int], total: int, quiet: bool):
        self.total, self.steps = total, dict(steps)  # seed -> done so far
        self.rates: dict[int, float] = {}  # of those under way
        self.rate = 0.0  # of all together
        self.returns: dict[int, dict[str, float]] = {}
        self.wide = max(len(str(s)) for s in steps)
        self.terminal = Terminal(f"{len(steps)} seeds", total * len(steps), sum(steps.values()), quiet)

    def advance(self, seed: int, step: int, rate: float) -> None:
        self.steps[seed], self.rates[seed] = step, rate
        self._show()

    def scores(self, seed: int, numbers: dict[str, Any], groups: list[str]) -> None:
        self.returns[seed] = {g: numbers[f"return/{g}"] for g in groups if numbers.get(f"return/{g}") is not None}
        every = {g: [r[g] for r in self.returns.values() if g in r] for g in groups}
        self.terminal.show(scores="  ".join(f"{g} {sum(x) / len(x):.2f}" for g, x in every.items() if x))

    def line(self, seed: int, text: str) -> None:
        self.terminal.line(f"seed {seed:>{self.wide}}  {text}")

    def leave(self, seed: int) -> None:
        """A run ended: it adds nothing to the rate any more."""
        self.rates.pop(seed, None)
        self._show()

    def close(self) -> None:
        self.terminal.close()

    def _show(self) -> None:
        self.rate = sum(self.rates.values()) or self.rate  # at the end, what it was
        slowest = min(self.steps.values()) / self.total
        self.terminal.show(completed=sum(self.steps.values()), rate=f"{short(self.rate)} steps/s, slowest at {slowest:.0%}")


class Place:
    """The display of one run among several: its place on their board."""

    def __init__(self, board: Board, seed: int):
        self.board, self.seed = board, seed

    def advance(self, step: int, rate: float) -> None:
        self.board.advance(self.seed, step, rate)

    def scores(self, numbers: dict[str, Any], groups: list[str]) -> None:
        self.board.scores(self.seed, numbers, groups)

    def line(self, text: str) -> None:
        self.board.line(self.seed, text)

    def close(self) -> None:
        self.board.leave(self.seed)


def short(x: float) -> str:
    """1234567 -> 1.23M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.3g}{unit}"
    return f"{x:.3g}"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 3600:02d}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
