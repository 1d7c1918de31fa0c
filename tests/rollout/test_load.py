"""Many prompts and many steps: nothing grows that should not."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hybrid_rl.config import Config, EvalConfig, OptimizerConfig, RlConfig, RolloutConfig, TinyConfig
from hybrid_rl.data import TaskSets
from hybrid_rl.engine.base import Completion, Request, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.policy import tiny
from hybrid_rl.policy.model import Policy
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.rl import train_rl
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.rollout.generate import Generator
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.run_folder.metrics import Metrics
from hybrid_rl.types import Task
from tests.conftest import WORDS
from tests.sessions import make_session

pytestmark = pytest.mark.slow


class Use:
    """What this process and its children hold, each time it is asked."""

    def __init__(self) -> None:
        self.me, self.taken = psutil.Process(), []  # type: ignore[var-annotated]

    def take(self) -> None:
        gc.collect()
        children = self.me.children(recursive=True)
        self.taken.append({
            "MiB": (self.me.memory_info().rss + sum(c.memory_info().rss for c in children)) / 2**20,
            "threads": self.me.num_threads(), "files": self.me.num_fds(), "children": len(children), "objects": sys.getallocatedblocks(),
        })  # fmt: skip

    def growth(self) -> dict[str, float]:
        """Mean of the last quarter less that of the second: the first is for what is made once."""
        quarter = len(self.taken) // 4
        second, last = self.taken[quarter : 2 * quarter], self.taken[-quarter:]
        return {
            key: statistics.fmean(t[key] for t in last) - statistics.fmean(t[key] for t in second) for key in second[0]
        }


class Scripted:
    """Stands in for an engine: three tokens for each request, made from its seed, at once. Nothing of a model takes part."""

    version, dtype, team = 0, torch.float32, Ranks()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        for request in requests:
            ids = [30 + request.seed % 50, 30 + request.seed // 50 % 50, 2]
            yield Completion(request.id, ids, [-1.0, -2.0, -0.5], [(0, 3)], "stop")


def test_ten_thousand_prompts_with_sixteen_completions_each(
    tiny_folder: Path, record_property: Callable[[str, object], None]
):
    """Through collector and real reward processes, 100 prompts a step. Every reward is that of its own completion."""
    policy = Policy.load(tiny_folder, torch.device("cpu"))
    tasks = [Task(f"t{i}", ({"role": "user", "content": f"{i}"},), str(i)) for i in range(10_000)]
    config = RolloutConfig(batch_size=1600, group_size=16, max_tokens=4, max_prompt_tokens=64, max_replacements=0)
    scorer, use, seen = Scorer({"_target_": "tests.rewards.hash_of_answer"}, 1, 30), Use(), set()
    try:
        scorer.check()
        generator = Generator(Scripted(), policy.tokenizer, scorer)  # type: ignore[arg-type]
        collector = Collector(generator, tasks, Config(rollout=config), 0)
        start = time.perf_counter()
        for _ in range(100):
            batch = collector.collect()
            assert sum(len(group.rollouts) for group in batch.all_groups) == 1600
            assert batch.reward_errors == 0
            seen |= {group.task.id for group in batch.all_groups}
            use.take()
        record_property("rewards_per_second", 160_000 / (time.perf_counter() - start))
    finally:
        scorer.close()
    growth = use.growth()
    record_property("growth", growth)
    print(growth, f"{160_000 / (time.perf_counter() - start):.0f} rewards/s")
    assert len(seen) == 10_000
    assert growth["MiB"] < 8
    assert growth["objects"] < 1000
    assert (growth["threads"], growth["files"], growth["children"]) == (0, 0, 0)


class Lines(Metrics):
    """The real metrics file, and a look at the process now and then."""

    def __init__(self, path: Path, use: Use, times: array):
        super().__init__(path)
        self.use, self.times, self.flush = use, times, lambda: None

    def write(self, stage: str, **values: Any) -> None:
        super().write(stage, **values)
        self.times.append(time.process_time())  # of this process's own work: who shares the machine does not count
        if len(self.times) % 50 == 0:
            self.flush()  # the file that is being written is open
            self.use.take()


def test_two_thousand_steps(tmp_path: Path, record_property: Callable[[str, object], None]):
    """The smallest model there is, with everything real: engine, reward process, update, files, checkpoints."""
    folder = tmp_path / "model"
    tiny.create(
        folder,
        TinyConfig(layers=1, hidden_size=16, intermediate_size=16, heads=1, kv_heads=1, head_dim=16, words=WORDS),
        0,
    )
    policy = Policy.load(folder, torch.device("cpu"))
    tasks = [Task(f"t{i}", ({"role": "user", "content": "x"},), str(i)) for i in range(50)]
    config = Config(
        rollout=RolloutConfig(batch_size=4, group_size=2, max_tokens=2, max_prompt_tokens=40, max_replacements=0),
        rl=RlConfig(steps=2000, checkpoint_every=100, eval_every=100, optimizer=OptimizerConfig(lr=1e-4)), eval=EvalConfig(max_tasks=2),
    )  # fmt: skip
    use, times = Use(), array("d")  # type: ignore[var-annotated]
    scorer = Scorer({"_target_": "tests.rewards.hash_of_answer"}, 1, 30)
    try:
        engine, lines = (
            LocalEngine(policy.sampler, policy.end_ids(), 4, 42),
            Lines(tmp_path / "metrics.jsonl", use, times),
        )
        sets = TaskSets([], tasks[2:], tasks[:2])
        s = make_session(config, tmp_path, policy, engine, sets, scorer, metrics=lines, quiet=True)
        lines.flush = s.rollouts.flush
        train_rl(s)
        s.metrics.close()
    finally:
        scorer.close()
    seconds = [b - a for a, b in pairwise(times)]
    half = len(seconds) // 2
    slower = statistics.median(seconds[half:]) / statistics.median(seconds[50:half])
    growth = use.growth()
    record_property("growth", growth)
    record_property("seconds", times[-1] - times[0])
    print(growth, f"{times[-1] - times[0]:.0f} s of work, second half {slower:.3f} of the first")
    assert s.progress.version == 2000
    assert len(os.listdir(tmp_path / "rollouts")) == config.rollout.keep_steps + 1, "the first step stays too"
    assert growth["MiB"] < 8
    assert growth["objects"] < 1000
    assert (growth["threads"], growth["files"], growth["children"]) == (0, 0, 0)
    assert slower < 1.3
