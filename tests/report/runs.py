"""Runs that the tests of the report write, and what reads its page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

from hybrid_rl.run_folder.rollouts import write_rollouts
from hybrid_rl.types import Group, Rollout, Task

HOSTILE = (
    "<script>document.title='owned'</script><img onerror=alert(1)>",
    "</textarea></pre></article><script>alert(2)</script>",
    "{{ 7*7 }} {% raw %}",
    "```\n````text\n# heading\n[link](x)",
)


VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page, checking that they nest, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def groups(rewards: list[float], completions: tuple[str, ...] = ()) -> list[Group]:
    """One group a reward, of one rollout; a task's id is its place."""
    made = []
    for id, reward in enumerate(rewards):
        task = Task(f"task-{id}", ({"role": "user", "content": "question"},), answer=f"truth {id}")
        rollout = Rollout(task.id, id, 0, seed=0, token_ids=[1])
        rollout.finish("stop", completions[id] if id < len(completions) else f"completion {id} of reward {reward}")
        rollout.score(reward, {"exact": reward})
        made.append(Group(id, task, [rollout]))
    return made


def store(path: Path, made: list[Group]) -> None:
    write_rollouts(path, made, [f"prompt {g.id}" for g in made], {}, [(g.id, 0) for g in made])


def rl(step: int, **changes: object) -> dict[str, object]:
    seconds = {"rollout": 0.3, "sleep": 0.0, "update": 0.1, "handover": 0.0, "evaluate": 0.0, "checkpoint": 0.0}
    return {
        "stage": "rl", "step": step, "version": step, "reward": 0.5, "reward_std": 0.2, "length": 28.0, "truncated": 0.01, "entropy": 0.4,
        "mismatch_kl": 1e-9, "clip_fraction": 0.0, "grad_norm": 0.8, "lr": 1e-3, "tokens_per_second": 20000.0, "memory_gib": 0.7,
        "silent_groups": 0, "replacement_rounds": 0, "reward_errors": 0, "missing_groups": 0, "skipped": 0, "parts": {"similarity": 0.5},
        "seconds": seconds,
    } | changes  # fmt: skip


def write_metrics(folder: Path, records: list[dict[str, object]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def evaluation(name: str, step: int, **values: object) -> dict[str, object]:
    return {"stage": "eval", "name": name, "step": step, "reward": 0.5, "reward_std": 0.1, "tasks": 4} | values
