"""What a person sees while a run goes on: progress where one waits, one line a step, nothing that clutters a log file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

Advance = Callable[..., None]


# control characters but tab and line feed, bidirectional marks, line separators, halves of surrogate pairs
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return the text with escapes, like \x1b and \u202e, for each character that steers a terminal or a line's direction; lines and tabs stay."""
    return STEERS.sub(lambda found: ascii(found[0])[1:-1], text)


class Console:
    """Plain lines on standard output; a progress bar only in a terminal, where it leaves nothing behind. A quiet one says nothing."""

    def __init__(self, quiet: bool = False) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True, quiet=quiet, emoji=False)
        self._said: set[str] = set()

    def say(self, text: str = "") -> None:
        """Print a line or several. What a model or a reward wrote may be among it, so nothing in it steers the terminal."""
        self._rich.print(visible(text), markup=False)

    def say_once(self, key: str, text: str) -> None:
        """The first text of each key."""
        if key not in self._said:
            self._said.add(key)
            self.say(text)

    def reward_faults(self, examples: dict[str, str]) -> None:
        """The first example of each kind of fault that a reward had, once a run."""
        for kind, example in examples.items():
            self.say_once(
                f"reward {kind}", f"reward failed ({kind}), {example}; the next ones of this kind are only counted"
            )

    def heading(self, text: str) -> None:
        self._rich.print(visible(f"\n{text}"), style="bold", markup=False)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Advance]:
        """Yield advance(count=1, note="", more=0): call it as work is done; `more` is work that comes on top of `total`."""
        if self._rich.quiet or not self._rich.is_terminal:
            yield lambda count=1, note="", more=0: None
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._rich, transient=True) as bar:
            task = bar.add_task(visible(what), total=total, note="")

            def advance(count: int = 1, note: str = "", more: int = 0) -> None:
                done, whole = bar.tasks[task].completed + count, (bar.tasks[task].total or 0) + more
                bar.update(
                    task, completed=min(done, whole), total=whole, note=visible(note)
                )  # a rank counts for others, and may be ahead

            yield advance


def step_line(m: dict[str, Any], steps: int) -> str:
    """One RL step in one line: only what was measured, and of counters that should be zero only those that are not."""
    seconds, nothing = m["seconds"], m.get("nothing_trained")
    updates = (
        ("entropy", "entropy", ".3f"), ("mismatch", "mismatch_kl", ".0e"), ("reference", "reference_kl", ".0e"), ("clip", "clip_fraction", ".1%"),
        ("grad", "grad_norm", ".2f"),
    )  # fmt: skip
    measured = "".join(f"{name} {m[key]:{form}}  " for name, key, form in updates if m.get(key) is not None)
    phases = " ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005)
    line = (
        f"step {m['step']:>{len(str(steps))}}/{steps}  reward {m['reward']:.3f}±{m['reward_std']:.2f}  len {m['length']:.1f}  "
        f"trunc {m['truncated']:.1%}  {measured}"
        f"{m['tokens_per_second'] / 1000:.1f}k tok/s  {m['memory_gib']:.2f} GiB  {sum(seconds.values()):.2f} s ({phases})"
    )
    notes = [f"nothing was trained: {NOTHING[nothing][0]}"] if nothing else []
    notes += [
        f"{m[key]:.0f} {text}{_kinds(m) if key == 'reward_errors' else ''}"
        for key, text in COUNTERS.items()
        if m.get(key)
    ]
    return line + ("  ! " + ", ".join(notes) if notes else "")


# why an RL step had no update, by the value of its metric nothing_trained; and what to do if that lasts
NOTHING = {
    "silent": (
        "every group was dropped (equal rewards, or failed ones)",
        "read rollouts/step_*.parquet; if no answer is ever paid, check the reward, or begin with SFT, easier tasks or another model.path; "
        "if every answer is paid, the task is solved",
    ),
    "truncated": (
        "every rollout reached rollout.max_tokens, and algo.mask_truncated leaves those out",
        "raise rollout.max_tokens, or set algo.mask_truncated=false",
    ),
    "corrected": (
        "algo.correction drops every token",
        "engine and trainer compute different probabilities; check with handover.verify=true, or widen the bounds of algo.correction",
    ),
    "zero_gradient": (
        "every gradient is 0",
        "algo.advantage sees no difference between rollouts; check the reward, and algo.silent_by",
    ),
    "not_finite": ("every update was skipped", "replay the batches in bad/"),
}  # fmt: skip


def _kinds(m: dict[str, Any]) -> str:
    """Faults by kind and, where tasks name their sources, by these."""
    sources = m.get("source_faults", {})
    counts = {"": m.get("reward_faults", {}), "from ": {} if list(sources) == ["unnamed"] else sources}
    lists = [word + ", ".join(f"{name} {count}" for name, count in c.items()) for word, c in counts.items() if c]
    return f" ({'; '.join(lists)})" if lists else ""


COUNTERS = {
    "silent_groups": "silent groups replaced",
    "missing_groups": "groups missing",
    "reward_errors": "rewards failed",
    "skipped": "update skipped (a number is not finite)",
    "engine_restarts": "× engine restarted",
}


def sft_line(m: dict[str, Any], steps: int) -> str:
    skipped = f"  ! {m['skipped']:.0f} {COUNTERS['skipped']}" if m["skipped"] else ""
    return (
        f"SFT {m['step']:>{len(str(steps))}}/{steps}  loss {m['loss']:.3f}  grad {m['grad_norm']:.2f}  lr {m['lr']:.1e}  "
        f"{m['tokens_per_second'] / 1000:.1f}k tok/s{skipped}"
    )


def eval_line(m: dict[str, Any]) -> str:
    """One evaluation in one line; of several samples a task the reward is their mean, and pass@1 and the largest pass@k say the rest."""
    failed = f"  ! {m['reward_errors']} rewards failed{_kinds(m)}" if m["reward_errors"] else ""
    pass_at = m.get("pass_at", {})
    shown = " ".join(f"pass@{k} {pass_at[k]:.2f}" for k in dict.fromkeys([*list(pass_at)[:1], *list(pass_at)[-1:]]))
    samples = f" × {m['samples']} samples, {shown}" if pass_at else ""
    return (
        f"evaluation of {EVALUATED[m['name']]}: reward {m['reward']:.3f} on {m['tasks']} held-out tasks{samples}, "
        f"length {m['length']:.1f}, truncated {m['truncated']:.1%}{failed}"
    )


EVALUATED = {
    "model": "the model",
    "base": "the base model",
    "sft": "the model after SFT",
    "rl": "the model after RL",
    "step": "the policy",
}
