"""Print the progress of a run: a progress bar in a terminal, one line a step, nothing that clutters a log file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

Advance = Callable[..., None]


# control characters except tab and line feed, bidirectional marks, line separators, lone surrogates
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return the text with an escape, like \x1b, for each character that controls a terminal or the text direction.

    Line feeds and tabs stay.
    """
    return STEERS.sub(lambda found: ascii(found[0])[1:-1], text)


class Console:
    """A writer of plain lines to standard output, with a progress bar in a terminal; `quiet` prints nothing."""

    def __init__(self, quiet: bool = False) -> None:
        # in a notebook too lines are text on standard output: rich would make an HTML block of each
        self._rich = RichConsole(highlight=False, soft_wrap=True, quiet=quiet, emoji=False, force_jupyter=False)
        self._said: set[str] = set()

    def __enter__(self) -> Console:
        """Return the console: a run lasts as long as its context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing; live.LiveConsole takes its view away."""

    def say(self, text: str = "") -> None:
        """Print lines. Control characters are escaped, since the text may contain what a model or a reward wrote."""
        self._rich.print(visible(text), markup=False)

    def say_once(self, key: str, text: str) -> None:
        """Print the text unless one with this key was printed before."""
        if key not in self._said:
            self._said.add(key)
            self.say(text)

    def reward_faults(self, examples: dict[str, str]) -> None:
        """Print the first example of each kind of reward fault, once a run."""
        for kind, example in examples.items():
            line = f"reward failed ({kind}), {example}; the next ones of this kind are only counted"
            self.say_once(f"reward {kind}", line)

    def step(self, values: dict[str, Any], steps: int) -> None:
        """Print the line of an RL step."""
        self.say(step_line(values, steps))

    def heading(self, text: str) -> None:
        """Print a bold line after an empty one."""
        self._rich.print(visible(f"\n{text}"), style="bold", markup=False)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Advance]:
        """Yield advance(count=1, note="", more=0), to be called as work is done; `more` is added to `total`."""
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
                # a rank also counts the work of others, and may count more than there is
                bar.update(task, completed=min(done, whole), total=whole, note=visible(note))

            yield advance


def step_line(m: dict[str, Any], steps: int) -> str:
    """Return one line about an RL step: what was measured, and the counters of problems that are not zero."""
    seconds, nothing = m["seconds"], m.get("nothing_trained")
    updates = (
        ("entropy", "entropy", ".3f"),
        ("mismatch", "mismatch_kl", ".0e"),
        ("reference", "reference_kl", ".0e"),
        ("clip", "clip_fraction", ".1%"),
        ("grad", "grad_norm", ".2f"),
    )
    measured = "".join(f"{name} {m[key]:{form}}  " for name, key, form in updates if m.get(key) is not None)
    if "lag" in m:
        measured = (
            f"lag {m['lag_mean']:.2f} (most {max(map(int, m['lag']))})  continued {m['continued_rollouts']}  {measured}"
        )
    phases = " ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005)
    line = (
        f"step {m['step']:>{len(str(steps))}}/{steps}  reward {m['reward']:.3f}±{m['reward_std']:.2f}  "
        f"len {m['length']:.1f}{_turns(m)}  trunc {m['truncated']:.1%}  {measured}"
        f"{m['tokens_per_second'] / 1000:.1f}k tok/s  {m['memory_gib']:.2f} GiB  "
        f"{sum(seconds.values()):.2f} s ({phases})"
    )
    notes = [f"nothing was trained: {NOTHING[nothing][0]}"] if nothing else []
    notes += [
        f"{m[key]:.0f} {text}{_kinds(m) if key == 'reward_errors' else ''}"
        for key, text in COUNTERS.items()
        if m.get(key)
    ]
    return line + ("  ! " + ", ".join(notes) if notes else "")


def _turns(m: dict[str, Any]) -> str:
    """Return the mean number of answers of conversations, "" for single answers."""
    return f" in {m['turns']:.1f} turns" if "turns" in m else ""


# value of the metric nothing_trained → why an RL step had no update, and what to do if that lasts
NOTHING = {
    "silent": (
        "every group was dropped (equal rewards, or failed ones)",
        "read rollouts/step_*.parquet; if no completion gets a reward, check the reward, or begin with SFT, easier "
        "tasks or another model.path; if every completion gets it, the task is solved",
    ),
    "truncated": (
        "every rollout reached rollout.max_tokens, and algo.mask_truncated=true leaves those out",
        "raise rollout.max_tokens, or set algo.mask_truncated=false",
    ),
    "corrected": (
        "algo.correction drops every token",
        "engine and trainer compute different probabilities; check with handover.verify=true, or widen the bounds of "
        "algo.correction",
    ),
    "zero_gradient": (
        "every gradient is 0",
        "algo.advantage sees no difference between rollouts; check the reward, and algo.silent_by",
    ),
    "not_finite": ("every update was skipped (non-finite numbers)", "replay the batches in bad/"),
}


def _kinds(m: dict[str, Any]) -> str:
    """Return the numbers of faults by kind and, if tasks name sources, by source."""
    sources = m.get("source_faults", {})
    counts = {"": m.get("reward_faults", {}), "from ": {} if list(sources) == ["unnamed"] else sources}
    lists = [word + ", ".join(f"{name} {count}" for name, count in c.items()) for word, c in counts.items() if c]
    return f" ({'; '.join(lists)})" if lists else ""


COUNTERS = {
    "silent_groups": "silent groups replaced",
    "missing_groups": "groups missing",
    "reward_errors": "rewards failed",
    "discarded_rollouts": "rollouts discarded as too old",
    "skipped": "update skipped (non-finite number)",
    "engine_restarts": "× engine restarted",
}


def sft_line(m: dict[str, Any], steps: int) -> str:
    """Return one line about an SFT step."""
    skipped = f"  ! {m['skipped']:.0f} {COUNTERS['skipped']}" if m["skipped"] else ""
    return (
        f"SFT {m['step']:>{len(str(steps))}}/{steps}  loss {m['loss']:.3f}  grad {m['grad_norm']:.2f}  "
        f"lr {m['lr']:.1e}  {m['tokens_per_second'] / 1000:.1f}k tok/s{skipped}"
    )


def eval_line(m: dict[str, Any]) -> str:
    """Return one line about an evaluation.

    With several samples a task, the reward is their mean, and pass@1, the largest pass@k and maj@n are added.
    """
    failed = f"  ! {m['reward_errors']} rewards failed{_kinds(m)}" if m["reward_errors"] else ""
    pass_at = m.get("pass_at", {})
    samples = f" × {m['samples']} samples, {_tries(m)}" if pass_at else ""
    greedy = f", greedy {_reward(m['greedy'])}" if "greedy" in m else ""
    return (
        f"evaluation of {EVALUATED[m['name']]}: reward {_reward(m)}{greedy} on {m['tasks']} held-out tasks{samples}, "
        f"length {m['length']:.1f}{_turns(m)}, truncated {m['truncated']:.1%}{failed}"
    )


def source_lines(m: dict[str, Any]) -> Iterator[str]:
    """Yield one line about each source of an evaluation, with the 95 % interval of its reward; first of all tasks."""
    for source, values in {"all tasks": m, **m.get("by_source", {})}.items():
        low, high = values["interval"] or (values["reward"], values["reward"])
        scores = f", correct {values['correct']:.1%}{_range(values, 'correct', '.1%')}"
        for kind in ("pass", "maj"):
            for k, value in values.get(f"{kind}_at", {}).items():
                scores += f", {kind}@{k} {value:.3f}{_range(values, f'{kind}@{k}', '.3f')}"
        yield f"{source}: reward {_reward(values)}, 95% {low:.3f} to {high:.3f}{scores}"


def _range(values: dict[str, Any], name: str, form: str) -> str:
    """Return the 95 % interval of a score in brackets, "" if there is none."""
    found = values.get("intervals", {}).get(name)
    return f" [{found[0]:{form}}, {found[1]:{form}}]" if found else ""


def _reward(values: dict[str, Any]) -> str:
    """Return a mean reward, with the measures beside it."""
    measures = ", ".join(f"{name} {value:.3f}" for name, value in values.get("measures", {}).items())
    return f"{values['reward']:.3f}{measures and f' ({measures})'}"


def _tries(values: dict[str, Any]) -> str:
    tries = {f"pass@{k}": value for k, value in values["pass_at"].items()}
    shown = {name: tries[name] for name in (*list(tries)[:1], *list(tries)[-1:])}
    shown |= {f"maj@{k}": value for k, value in values.get("maj_at", {}).items()}
    return " ".join(f"{name} {value:.2f}" for name, value in shown.items())


EVALUATED = {
    "model": "the model",
    "base": "the base model",
    "sft": "the model after SFT",
    "rl": "the model after RL",
    "step": "the policy",
}
