"""Collects the rollouts of one step: groups in task order, the ones without a signal replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from hybrid_rl.algo.overlong import penalty
from hybrid_rl.config import AlgoConfig, RolloutConfig
from hybrid_rl.data.sampler import Sampler
from hybrid_rl.engine.base import Engine, EngineDied, Sampling
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.rollout.generate import fault_metrics, first_faults, make_group, reward_faults, sample_groups
from hybrid_rl.rollout.rewards import RewardError, Scorer
from hybrid_rl.types import Group, Rollout, Task


@dataclass(slots=True)
class Batch:
    """What a step trains on, and what it cost to get there. `groups` are in the order their tasks were drawn."""

    groups: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)  # silent, or with a reward that failed
    missing_groups: int = 0  # what is left to the full number after the last round of replacements
    silent_groups: int = 0
    reward_errors: int = 0
    reward_faults: Counter[tuple[str, str]] = field(default_factory=Counter)  # the same by (source of the task, kind)
    examples: dict[str, str] = field(default_factory=dict)  # of each kind the first: task and error
    replacement_rounds: int = 0
    trained: set[tuple[int, int]] = field(default_factory=set)  # (group id, index) of the rollouts that an update used
    greedy: dict[int, float] = field(
        default_factory=dict
    )  # by group id, what the most likely completion was paid; where it was asked for

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def all_groups(self) -> list[Group]:
        return sorted([*self.groups, *self.dropped], key=lambda group: group.id)


class Collector:
    """Draws tasks, samples a group for each and drops groups without a signal (algo.silent_by) or with a reward that could not be had.

    Replacements are asked for in rounds, after all of a round's rewards are in: which tasks a step uses, and what shares
    the engine's batch, then depends on no clock, and a run can be repeated bit for bit. Every rank draws and decides alike.
    """

    def __init__(
        self, engine: Engine, tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase, scorer: Scorer, config: RolloutConfig, seed: int,
        ranks: Ranks | None = None, algo: AlgoConfig | None = None, greedy: bool = False,
        revive: Callable[[EngineDied], None] | None = None, data_seed: int | None = None,
    ):  # fmt: skip
        self.ranks, self.algo, self.greedy, self.revive = ranks or Ranks(), algo or AlgoConfig(), greedy, revive
        self.engine, self.tasks, self.tokenizer, self.scorer, self.config, self.seed = (
            engine,
            tasks,
            tokenizer,
            scorer,
            config,
            seed,
        )
        self.sampler = Sampler(len(tasks), seed if data_seed is None else data_seed)
        self.next_group = 0
        self.sampling = Sampling(config.temperature, config.top_k, config.top_p, config.max_tokens)

    def collect(self, advance: Callable[..., None] = lambda count=1, more=0: None) -> Batch:
        """`rollout.batch_size` rollouts with a signal, or fewer after `rollout.max_replacements` rounds.

        `advance` is told of completions, and of `more` of them than the batch's as groups are replaced.
        Raises RewardError where not one reward of the whole step could be had, or a larger share failed than rollout.max_reward_failures.
        """
        batch, asked, wanted = Batch(), 0, self.config.batch_size // self.config.group_size
        for round in range(1 + self.config.max_replacements):
            if len(batch.groups) == wanted:
                break
            batch.replacement_rounds = round
            groups = [self._new_group(self.tasks[i]) for i in self.sampler.draw(wanted - len(batch.groups))]
            if round:
                advance(0, more=len(groups) * self.config.group_size)
            self._sample(groups, self.sampling, advance)
            scored = groups
            if self.greedy:
                likely = self._greedy(groups)
                batch.greedy |= {group.id: group.rewards[0] for group in likely if not group.failed}
                scored = [*groups, *likely]
            asked += sum(len(group.rollouts) for group in scored)
            batch.reward_faults.update(reward_faults(scored))
            batch.examples = first_faults(scored) | batch.examples
            for group in groups:
                failed = group.failed or (self.greedy and group.id not in batch.greedy)
                kept = not failed and not self._silent(group)
                batch.silent_groups += not failed and not kept
                (batch.groups if kept else batch.dropped).append(group)
        batch.missing_groups = wanted - len(batch.groups)
        batch.reward_errors = batch.reward_faults.total()
        self._check_failures(batch, asked)
        return batch

    def _check_failures(self, batch: Batch, asked: int) -> None:
        """Of `asked` rewards."""
        rollouts, most = (
            [rollout for group in batch.all_groups for rollout in group.rollouts],
            self.config.max_reward_failures,
        )
        if all(rollout.error for rollout in rollouts):
            raise RewardError(f"all {len(rollouts)} rewards of a step failed; the last: {rollouts[-1].error}")
        if batch.reward_errors > most * asked:
            kinds = ", ".join(
                f"{kind} {count}" for kind, count in fault_metrics(batch.reward_faults)["reward_faults"].items()
            )
            first = next(iter(batch.examples.values()))
            raise RewardError(
                f"{batch.reward_errors} of {asked} rewards of a step failed ({kinds}), more than rollout.max_reward_failures={most:g} "
                f"of them; the first: {first}"
            )

    def _sample(
        self, groups: Sequence[Group], sampling: Sampling, on_completion: Callable[[int], None] = lambda count: None
    ) -> None:
        sample_groups(
            self.engine, groups, sampling, self.tokenizer, self.scorer, self.ranks, on_completion, self.revive
        )
        if buffer := round(self.algo.overlong_share * sampling.max_tokens):
            for rollout in (r for group in groups for r in group.rollouts if r.reward is not None):
                cost = penalty(rollout.sampled, sampling.max_tokens, buffer)
                if "overlong" in rollout.reward_parts:
                    raise RewardError(
                        "the reward has a part named overlong, as algo.overlong_share adds one; rename it, or set that to 0"
                    )
                rollout.shape("overlong", self.algo.overlong_penalty * cost)

    def _greedy(self, groups: Sequence[Group]) -> list[Group]:
        """Of each group's task the most likely completion, scored: groups of one with the same ids."""
        size = self.config.max_prompt_tokens
        likely = [make_group(g.id, g.task, 1, self.tokenizer, size, self.seed, "greedy", g.id) for g in groups]
        self._sample(likely, replace(self.sampling, temperature=0.0))
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
        return {"sampler": self.sampler.state(), "next_group": self.next_group}

    def restore(self, state: dict) -> None:
        self.sampler.restore(state["sampler"])
        self.next_group = state["next_group"]

    def _new_group(self, task: Task) -> Group:
        id, config = self.next_group, self.config
        self.next_group += 1
        return make_group(id, task, config.group_size, self.tokenizer, config.max_prompt_tokens, self.seed, "rl", id)
