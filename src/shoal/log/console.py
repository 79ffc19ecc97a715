"""What a person sees while a run goes on: a bar in a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class Progressor:
    def __init__(self, total: int, done: int, quiet: bool):
        self.total, self.quiet = total, quiet
        self.console = Console(file=sys.stdout, highlight=False)
        self.live = not quiet and self.console.is_terminal
        self.bar: Progress | None = None
        self.shown: dict[str, str] = {}
        if self.live:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("[cyan]{task.fields[scores]}"),
                console=self.console,
            )
            self.task = self.bar.add_task("training", total=total, completed=done, rate="", scores="")
            self.bar.start()

    def advance(self, step: int, rate: float) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step, rate=f"{short(rate)} steps/s")

    def scores(self, numbers: dict[str, Any], groups: list[str]) -> None:
        """Show the groups' returns beside the bar."""
        self.shown = {g: f"{numbers[f'return/{g}']:.2f}" for g in groups if numbers.get(f"return/{g}") is not None}
        if self.bar is not None:
            self.bar.update(self.task, scores="  ".join(f"{g} {x}" for g, x in self.shown.items()))

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


def short(x: float) -> str:
    """1234567 -> 1.23M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.3g}{unit}"
    return f"{x:.3g}"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 3600:02d}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
