"""Collects the rollouts of one step: groups in task order, the ones without a signal replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from hybrid_rl.config import RolloutConfig
from hybrid_rl.data.sampler import Sampler
from hybrid_rl.engine.base import Engine, Sampling
from hybrid_rl.ranks import Ranks
from hybrid_rl.rollout.reward import RewardError, Scorer
from hybrid_rl.rollout.sample import make_group, sample_groups
from hybrid_rl.types import Group, Rollout, Task


@dataclass(slots=True)
class Batch:
    """What a step trains on, and what it cost to get there. `groups` are in the order their tasks were drawn."""

    groups: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)  # silent, or with a reward that failed
    missing_groups: int = 0  # what is left to the full number after the last round of replacements
    silent_groups: int = 0
    reward_errors: int = 0
    replacement_rounds: int = 0

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def all_groups(self) -> list[Group]:
        return sorted([*self.groups, *self.dropped], key=lambda group: group.id)


class Collector:
    """Draws tasks, samples a group for each and drops groups whose rewards are all equal or could not be had.

    Replacements are asked for in rounds, after all of a round's rewards are in: which tasks a step uses, and what shares
    the engine's batch, then depends on no clock, and a run can be repeated bit for bit. Every rank draws and decides alike.
    """

    def __init__(
        self, engine: Engine, tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase, scorer: Scorer, config: RolloutConfig, seed: int,
        ranks: Ranks | None = None,
    ):  # fmt: skip
        self.ranks = ranks or Ranks()
        self.engine, self.tasks, self.tokenizer, self.scorer, self.config, self.seed = engine, tasks, tokenizer, scorer, config, seed
        self.sampler = Sampler(len(tasks), seed)
        self.next_group = 0
        self.sampling = Sampling(config.temperature, config.top_k, config.top_p, config.max_tokens)

    def collect(self, on_completion: Callable[[int], None] = lambda count: None) -> Batch:
        """`rollout.batch_size` rollouts with a signal, or fewer after `rollout.max_replacements` rounds.

        Raises RewardError where not one reward of the whole step could be had.
        """
        batch, wanted = Batch(), self.config.batch_size // self.config.group_size
        for round in range(1 + self.config.max_replacements):
            if len(batch.groups) == wanted:
                break
            batch.replacement_rounds = round
            groups = [self._new_group(self.tasks[i]) for i in self.sampler.draw(wanted - len(batch.groups))]
            batch.reward_errors += sample_groups(self.engine, groups, self.sampling, self.tokenizer, self.scorer, self.ranks, on_completion)
            for group in groups:
                kept = not group.failed and not group.silent
                batch.silent_groups += not group.failed and not kept
                (batch.groups if kept else batch.dropped).append(group)
        batch.missing_groups = wanted - len(batch.groups)
        rollouts = [rollout for group in batch.all_groups for rollout in group.rollouts]
        if all(rollout.error for rollout in rollouts):
            raise RewardError(f"all {len(rollouts)} rewards of a step failed; the last: {rollouts[-1].error}")
        return batch

    def state(self) -> dict[str, object]:
        return {"sampler": self.sampler.state(), "next_group": self.next_group}

    def restore(self, state: dict) -> None:
        self.sampler.restore(state["sampler"])
        self.next_group = state["next_group"]

    def _new_group(self, task: Task) -> Group:
        id, config = self.next_group, self.config
        self.next_group += 1
        return make_group(id, task, config.group_size, self.tokenizer, config.max_prompt_tokens, self.seed, "rl", id)
