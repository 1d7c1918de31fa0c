"""Show below a run's lines what it does now: its phase, the last step, the course of the reward (console=live).

The lines of a run are printed as without it, above the view, so nothing is hidden; the view goes away when the run ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybrid_rl.processes import hangs
from hybrid_rl.report.console import Advance, Console, visible

BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN = {"length": ".1f", "truncated": ".1%", "entropy": ".3f", "mismatch_kl": ".0e", "grad_norm": ".2f"}


class LiveConsole(Console):
    """A console of one process in a terminal with a view of the run at its end, to be entered as a context."""

    def __init__(self) -> None:
        super().__init__()
        self._rewards: deque[float] = deque(maxlen=60)
        self._step, self._steps = dict[str, Any](), 0
        self._task: list[Any] = ["", 0, 0, ""]  # what, done, total, note
        self._live: Live | None = None

    def __enter__(self) -> LiveConsole:
        """Show the view until the context ends, however it ends."""
        self._live = Live(
            get_renderable=self.view, console=self._rich, refresh_per_second=4, transient=True, vertical_overflow="crop"
        )
        self._live.start()
        self._rich.show_cursor()  # a process that is killed could not show it again
        return self

    def __exit__(self, *_: object) -> None:
        """Take the view away; what comes after, like an error, is printed as ever."""
        if self._live:
            self._live.stop()

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Advance]:
        """Yield advance(count=1, note="", more=0), as Console.progress does; the view shows what is done."""
        self._task = [what, 0, total, ""]

        def advance(count: int = 1, note: str = "", more: int = 0) -> None:
            _, done, whole, _ = self._task
            self._task = [what, min(done + count, whole + more), whole + more, note]

        try:
            yield advance
        finally:
            self._task = ["", 0, 0, ""]

    def step(self, values: dict[str, Any], steps: int) -> None:
        """Print the line of an RL step, and show its numbers until the next one."""
        super().step(values, steps)
        if math.isfinite(values["reward"]):
            self._rewards.append(values["reward"])
        self._step, self._steps = values, steps

    def view(self) -> Panel:
        """Return the view as it is now."""
        what, done, total, note = self._task
        now = Table.grid(padding=(0, 2))
        now.add_row(
            Text(visible(what) or hangs.current() or "…"),
            ProgressBar(total=total, completed=done, width=30) if total else "",
            Text(f"{done}/{total}  {visible(note)}" if total else ""),
        )
        lines: list[Any] = [now]
        if step := self._step:
            seconds = "  ".join(f"{name} {value:.2f} s" for name, value in step["seconds"].items() if value >= 0.005)
            numbers = "  ".join(f"{key} {step[key]:{form}}" for key, form in SHOWN.items() if step.get(key) is not None)
            lines += [
                Text(f"step {step['step']}/{self._steps}  {seconds}  {numbers}", no_wrap=True, overflow="ellipsis"),
                Text(f"reward {step['reward']:.3f}  {sparkline(list(self._rewards))}", no_wrap=True, overflow="crop"),
            ]
        return Panel(Group(*lines), title="hybrid_rl", title_align="left")


def sparkline(values: list[float]) -> str:
    """Return one block a value, the lowest for the smallest, with both ends of the scale; "" without values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return f"{low:.2f} {''.join(BLOCKS[round((value - low) * scale)] for value in values)} {high:.2f}"
