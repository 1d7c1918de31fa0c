"""The view of console=live: every line that a run prints is still printed, and the view is gone when the run ends."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console as RichConsole

from hybrid_rl import stages
from hybrid_rl.config import Config, ConsoleKind
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.report.console import Console, step_line
from hybrid_rl.report.live import LiveConsole, sparkline
from tests.report.test_console import STEERING, step


@pytest.fixture
def console() -> LiveConsole:
    live = LiveConsole()
    live._rich = RichConsole(force_terminal=True, file=io.StringIO(), width=200, soft_wrap=True, highlight=False)
    return live


def shown(console: LiveConsole) -> str:
    """The view as text."""
    page = RichConsole(file=io.StringIO(), width=200)
    page.print(console.view())
    return page.file.getvalue()  # type: ignore[attr-defined]


def test_it_shows_the_phase_the_last_step_and_the_rewards(console: LiveConsole) -> None:
    assert len(shown(console).splitlines()) == 3, "before the first step"
    for reward in (0.0, 0.5, 1.0, float("nan")):
        console.step(step(step=7, reward=reward, entropy=None), 20)
    with console.progress(f"sampling{STEERING}", 8) as advance:
        advance(3)
        advance(3, note=STEERING, more=4)
        view = shown(console)
    assert "6/12" in view
    assert "step 7/20  rollout 0.30 s  length 28.0  truncated 1.0%  mismatch_kl 1e-09  grad_norm 0.80" in view
    assert "reward nan  0.00 ▁▅█ 1.00" in view
    assert "\x1b[31m" not in view
    assert "6/12" not in shown(console)


def test_every_line_is_printed_and_the_view_ends_with_the_run(console: LiveConsole) -> None:
    def run() -> None:
        with console:
            console.say("a line")
            print("of a library")
            print("to standard error", file=sys.stderr)
            console.step(step(), 20)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console._rich.file.getvalue())  # type: ignore[attr-defined]
    for line in ("a line", "of a library", "to standard error", step_line(step(), 20)):
        assert line in text
    assert console._rich._live is None if hasattr(console._rich, "_live") else not console._rich._live_stack
    console.say("after it")
    assert console._rich.file.getvalue().endswith("after it\n")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "terminal", "world", "live"), [
    ("live", True, 1, True), ("live", False, 1, False), ("live", True, 2, False), ("lines", True, 1, False),
])  # fmt: skip
def test_without_a_terminal_and_with_several_ranks_there_are_plain_lines(
    monkeypatch, kind, terminal, world, live
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    console = stages.make_console(Config(console=ConsoleKind[kind]), Ranks(world=world))
    assert type(console) is (LiveConsole if live else Console)


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.5, 0.5]) == "0.50 ▁▁ 0.50"
    assert sparkline([-1.0, 0.0, 1.0]) == "-1.00 ▁▅█ 1.00"
