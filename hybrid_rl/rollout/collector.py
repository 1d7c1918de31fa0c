"""Collect the rollouts of one step: groups in task order, with those that carry no signal replaced."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hybrid_rl.algo.declared import needs
from hybrid_rl.algo.overlong import penalty
from hybrid_rl.config import Config, data_config
from hybrid_rl.data.draws import make_draws
from hybrid_rl.engine.base import Sampling
from hybrid_rl.rollout.generate import Generator, fault_metrics, first_faults, reward_faults
from hybrid_rl.rollout.partial import Begun, Partial, Underway
from hybrid_rl.rollout.rewards import RewardError
from hybrid_rl.types import Group, Rollout, Task


@dataclass(slots=True)
class Batch:
    """What a step trains on, and the counts of its collection; `groups` are in the order their tasks were drawn."""

    groups: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)  # silent, or with a reward that failed
    missing_groups: int = 0  # how many are still missing after the last round of replacements
    silent_groups: int = 0
    reward_errors: int = 0
    reward_faults: Counter[tuple[str, str]] = field(default_factory=Counter)  # the same by (task's source, kind)
    examples: dict[str, str] = field(default_factory=dict)  # the first fault of each kind: its task and the error
    replacement_rounds: int = 0
    curriculum: dict[str, int] = field(default_factory=dict)  # what metrics show of data.curriculum
    trained: set[tuple[int, int]] = field(default_factory=set)  # (group id, index) of the rollouts an update used
    # (group id, index) → numbers of the sampled tokens that rollout files keep, by column: see Learner
    tokens: dict[tuple[int, int], dict[str, np.ndarray]] = field(default_factory=dict)
    greedy: dict[int, float] = field(default_factory=dict)  # group id → reward of the most likely completion, if asked
    partial: Partial | None = None  # with rollout.oversample above 1

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def all_groups(self) -> list[Group]:
        return sorted([*self.groups, *self.dropped], key=lambda group: group.id)


class Collector:
    """Draw tasks, sample a group for each, and drop groups that carry no signal or have a reward that failed.

    `algo.silent_by` says by which number a group is silent. Replacements are sampled in rounds, each after all rewards
    of the round before: which tasks a step uses, and what shares the engine's batch, then does not depend on timing,
    and a run can be repeated bit for bit. Every rank draws and decides alike. With rollout.oversample a round ends when
    enough groups have, and what is under way then goes on in the next round or step.
    """

    def __init__(self, generator: Generator, tasks: Sequence[Task], config: Config, data_seed: int):
        rollout = config.rollout
        self.generator, self.tasks, self.config, self.algo = generator, tasks, rollout, config.algo
        self.seed = config.seed
        self.greedy = "greedy" in needs(config.algo.advantage)  # each task also gets its most likely completion
        groups = rollout.batch_size // rollout.group_size
        self.extra = extra_groups(rollout.oversample, groups)
        self.draws = make_draws(tasks, data_config(config.data), data_seed, groups + self.extra)
        self.next_group, self.underway = 0, Underway(generator)
        self.sampling = Sampling(rollout.temperature, rollout.top_k, rollout.top_p, rollout.max_tokens)

    def collect(self, step: int = 0, advance: Callable[..., None] = lambda count=1, more=0: None) -> Batch:
        """Return `rollout.batch_size` rollouts with a signal, or fewer after `rollout.max_replacements` rounds.

        `advance` is called with the number of completions that have ended, and with `more` when replacements add some.
        Raises RewardError if all rewards of a step failed, or a larger share than rollout.max_reward_failures.
        Collective.
        """
        batch, asked, wanted = Batch(), 0, self.config.batch_size // self.config.group_size
        if self.extra or self.underway.groups:  # the latter after a resume without oversampling
            batch.partial = self.underway.begin_step(self.config.max_staleness)
        for round in range(1 + self.config.max_replacements):
            if len(batch.groups) == wanted:
                break
            batch.replacement_rounds, missing = round, wanted - len(batch.groups)
            if round:
                advance(0, more=missing * self.config.group_size)
            if batch.partial:
                places, groups = self._first_to_end(missing, step, batch.partial, advance)
            else:
                places = self.draws.draw(missing, step)
                groups = [self._new_group(self.tasks[i]) for i in places]
                self._fill(groups, self.sampling, advance)
            scored = groups
            if self.greedy:
                likely = self._most_likely(groups)
                batch.greedy |= {group.id: group.rewards[0] for group in likely if not group.failed}
                scored = [*groups, *likely]
            asked += sum(len(group.rollouts) for group in scored)
            batch.reward_faults.update(reward_faults(scored))
            batch.examples = first_faults(scored) | batch.examples
            for place, group in zip(places, groups, strict=True):
                self.draws.learn(place, group)
                failed = group.failed or (self.greedy and group.id not in batch.greedy)
                kept = not failed and not self._silent(group)
                batch.silent_groups += not failed and not kept
                (batch.groups if kept else batch.dropped).append(group)
        batch.groups.sort(key=lambda group: group.id)
        batch.missing_groups = wanted - len(batch.groups)
        batch.reward_errors = batch.reward_faults.total()
        batch.curriculum = self.draws.numbers()
        self._check_failures(batch, asked)
        return batch

    def _first_to_end(
        self, wanted: int, step: int, counts: Partial, advance: Callable[..., None]
    ) -> tuple[list[int], list[Group]]:
        """Return the first `wanted` groups to end, with the places of their tasks.

        As many groups as asked for, and `extra` ones, are under way: those of earlier rounds and steps, and new ones.
        """
        for place in self.draws.draw(max(0, wanted + self.extra - len(self.underway.groups)), step):
            self.underway.groups.append(Begun(place, self._new_group(self.tasks[place])))
        closed = self.underway.close(wanted, self.sampling, counts, advance)
        groups = [begun.group for begun in closed]
        self._shape(groups, self.sampling)
        return [begun.place for begun in closed], groups

    def _check_failures(self, batch: Batch, asked: int) -> None:
        """Raise RewardError if too many of the `asked` rewards failed."""
        rollouts = [rollout for group in batch.all_groups for rollout in group.rollouts]
        most = self.config.max_reward_failures
        if all(rollout.error for rollout in rollouts):
            raise RewardError(f"all {len(rollouts)} rewards of a step failed; the last: {rollouts[-1].error}")
        if batch.reward_errors > most * asked:
            counts = fault_metrics(batch.reward_faults)["reward_faults"]
            kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items())
            raise RewardError(
                f"{batch.reward_errors} of {asked} rewards of a step failed ({kinds}), more than "
                f"rollout.max_reward_failures={most:g} of them; the first: {next(iter(batch.examples.values()))}"
            )

    def _fill(
        self, groups: Sequence[Group], sampling: Sampling, on_completion: Callable[[int], None] = lambda count: None
    ) -> None:
        """Sample and score the groups, and subtract the penalty of overlong completions."""
        self.generator.fill(groups, sampling, on_completion)
        self._shape(groups, sampling)

    def _shape(self, groups: Sequence[Group], sampling: Sampling) -> None:
        """Subtract the penalty of overlong completions."""
        if buffer := round(self.algo.overlong_share * sampling.max_tokens):
            for rollout in (r for group in groups for r in group.rollouts if r.reward is not None):
                cost = penalty(rollout.sampled, sampling.max_tokens, buffer)
                if "overlong" in rollout.reward_parts:
                    raise RewardError(
                        "the reward has a part named overlong, which algo.overlong_share adds too; rename the part, "
                        "or set algo.overlong_share=0"
                    )
                rollout.shape("overlong", self.algo.overlong_penalty * cost)

    def _most_likely(self, groups: Sequence[Group]) -> list[Group]:
        """Return the most likely completion of each group's task, scored, as groups of one with the same ids."""
        size = self.config.max_prompt_tokens
        likely = [self.generator.new_group(g.id, g.task, 1, size, self.seed, "greedy", g.id) for g in groups]
        self._fill(likely, replace(self.sampling, temperature=0.0))
        return likely

    def _silent(self, group: Group) -> bool:
        try:
            return group.silent(self.algo.silent_by)
        except KeyError:
            parts = ", ".join(sorted({name for r in group.rollouts for name in r.reward_parts}))
            raise RewardError(
                f"algo.silent_by={self.algo.silent_by}: the reward has no such part; it has {parts}"
            ) from None

    def state(self) -> dict[str, object]:
        underway = {"underway": self.underway.state()} if self.underway.groups else {}
        return {"sampler": self.draws.state(), "next_group": self.next_group, **underway}

    def restore(self, state: dict) -> None:
        self.draws.restore(state["sampler"])
        self.next_group = state["next_group"]
        self.underway.restore(state.get("underway", ()), lambda place, id: self._group(self.tasks[place], id))

    def _new_group(self, task: Task) -> Group:
        self.next_group += 1
        return self._group(task, self.next_group - 1)

    def _group(self, task: Task, id: int) -> Group:
        config = self.config
        return self.generator.new_group(id, task, config.group_size, config.max_prompt_tokens, self.seed, "rl", id)


def extra_groups(oversample: float, groups: int) -> int:
    """Return how many groups are under way beside the `groups` of a step."""
    return math.ceil(round((oversample - 1) * groups, 6))  # 1.1 · 10 is one group more, not two
