"""Turn tasks into scored groups, for training and evaluation alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
from transformers import PreTrainedTokenizerBase

from hybrid_rl.data.render import completion_text, prompt_ids
from hybrid_rl.engine.base import (
    KV_CACHE,
    Completion,
    Engine,
    EngineDied,
    EngineError,
    Request,
    Sampling,
    request_seed,
)
from hybrid_rl.policy.reward_model import RewardModel
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.rollout.turns import Conversations
from hybrid_rl.types import Group, Rollout, Task


@dataclass(frozen=True, slots=True)
class Generator:
    """Fill groups of rollouts on every rank: the engine samples completions, and the scorer rewards them."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer
    ranks: Ranks = field(default_factory=Ranks)
    revive: Callable[[EngineDied], None] | None = None  # restarts a dead engine with the current weights; collective
    reward_model: RewardModel | None = None
    max_turns: int = 0  # answers of the policy in a conversation with an environment; 0: there is none

    def new_group(self, id: int, task: Task, size: int, max_prompt_tokens: int, *seed_facts: object) -> Group:
        """Return a group of empty rollouts: the prompt is rendered once, and each rollout has a random stream."""
        ids = prompt_ids(task, self.tokenizer, max_prompt_tokens)
        return Group(
            id, task, [Rollout(task.id, id, i, request_seed(*seed_facts, i), np.array(ids)) for i in range(size)]
        )

    def fill(
        self, groups: Sequence[Group], sampling: Sampling, on_completion: Callable[[int], None] = lambda count: None
    ) -> int:
        """Add a completion and its reward to every rollout; each is scored while others are still sampled. Collective.

        With an environment a rollout is a conversation. All take their turns together: the next answers are sampled
        when all replies are in, so that what shares the engine's batch does not depend on timing.

        A rank samples and scores its contiguous share, then every rank gets all of them. Only a request's seed decides
        its tokens, so it does not matter which rank samples it. If the engine of a rank dies, all ranks call `revive`
        together, and the requests that it had not finished are made again; without `revive`, EngineDied is raised.

        Return the number of rewards that failed; those rollouts have `error` and no reward.
        """
        order = [(group, rollout) for group in groups for rollout in group.rollouts]
        mine = self.ranks.share(len(order), self.engine.team.world)
        talks = Conversations(self.tokenizer, self.max_turns, sampling.max_tokens) if self.max_turns else None
        world = self.ranks.world // self.engine.team.world  # the other ranks are about as far
        open = {i: Request(i, _prompt(order[i][1]), order[i][1].seed) for i in mine}
        while self.ranks.largest(len(open)):
            asked = len(open)
            self._sample(open, order, sampling, talks, lambda: on_completion(0 if talks else world))
            if talks is None:
                break
            open = self.ranks.on_all(partial(self._next_turns, talks, order, mine))
            on_completion((asked - len(open)) * world)
        self.scorer.finish()
        if self.reward_model:
            self._pay([order[i] for i in mine], self.reward_model)
        if self.ranks.world > 1:
            everyone = chain.from_iterable(self.ranks.all_gather([order[i][1] for i in mine]))
            for group in groups:
                group.rollouts = [next(everyone) for _ in group.rollouts]
        return sum(rollout.error is not None for group in groups for rollout in group.rollouts)

    def _sample(
        self,
        open: dict[int, Request],
        order: Sequence[tuple[Group, Rollout]],
        sampling: Sampling,
        talks: Conversations | None,
        on_completion: Callable[[], None],
    ) -> None:
        """Sample the requests, by their place in `order`, and submit what was sampled to the scorer. Collective."""
        waiting = dict(open)
        while True:
            death: EngineDied | None = None
            try:
                for completion in self.engine.generate(list(waiting.values()), sampling):
                    self._take(completion, *order[completion.id], talks)
                    on_completion()
                    del waiting[completion.id]
            except EngineDied as error:
                death = error
            deaths = [error for error in self.ranks.all_gather(death) if error]
            if not deaths:
                return
            if self.revive is None:
                raise death or deaths[0]
            self.revive(deaths[0])

    def _next_turns(
        self, talks: Conversations, order: Sequence[tuple[Group, Rollout]], mine: Iterable[int]
    ) -> dict[int, Request]:
        """Append what the environment replied; return requests for the next answers, which go on in the same streams."""
        places = {(order[i][1].group_id, order[i][1].index): i for i in mine}
        found: dict[int, Request] = {}
        for rollout, turn in self.scorer.settle():
            place = places[rollout.group_id, rollout.index]
            if ended := talks.goes_on(rollout, order[place][0].task, turn):
                self.scorer.submit(rollout, order[place][0].task, ended)
                continue
            ids, logprobs = rollout.token_ids[rollout.prompt_length :], rollout.logprobs[rollout.prompt_length :]
            found[place] = Request(place, _prompt(rollout), rollout.seed, ids.tolist(), logprobs.tolist())
        return dict(sorted(found.items()))

    def _pay(self, order: Sequence[tuple[Group, Rollout]], model: RewardModel) -> None:
        """Let the reward model score this rank's rollouts while the engine has no KV cache. Collective."""
        with suppress(EngineDied):  # then its memory is free, and it is found out when it wakes
            self.ranks.on_all(lambda: self.engine.sleep([KV_CACHE]))
        self.ranks.on_all(lambda: model.pay(order))
        try:
            self.ranks.on_all(lambda: self.engine.wake([KV_CACHE]))
        except EngineDied as error:
            if self.revive is None:
                raise
            self.revive(error)

    def _take(self, completion: Completion, group: Group, rollout: Rollout, talks: Conversations | None) -> None:
        """Add a completion to its rollout and submit it for scoring."""
        known = len(rollout.token_ids) - rollout.prompt_length  # of earlier turns
        ids = completion.token_ids[known:]
        try:
            rollout.add_sampled(ids, completion.logprobs[known:], completion.versions)
        except ValueError as error:  # the weights or the engine are broken: no sample can be trusted
            raise EngineError(
                f"the engine's completion of group {group.id}, rollout {rollout.index}: {error}"
            ) from error
        text = completion_text(ids, self.tokenizer, completion.finish_reason == "stop")
        if talks:
            said = talks.answered(rollout, text, completion.finish_reason)
            self.scorer.submit(rollout, group.task, said)
        else:
            rollout.finish(completion.finish_reason, text)
            self.scorer.submit(rollout, group.task)


def _prompt(rollout: Rollout) -> list[int]:
    ids: list[int] = rollout.token_ids[: rollout.prompt_length].tolist()
    return ids


def reward_faults(groups: Iterable[Group]) -> Counter[tuple[str, str]]:
    """Count the rewards that failed, by (source of the task, kind of fault)."""
    failed = ((group, r) for group in groups for r in group.rollouts if r.error is not None)
    return Counter((group.task.source or "unnamed", r.fault or "unknown") for group, r in failed)


def fault_metrics(faults: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Return `reward_faults`, the counts by kind, and `source_faults`, the counts by source, sorted by name."""
    kinds, sources = Counter[str](), Counter[str]()
    for (source, kind), count in faults.items():
        kinds[kind] += count
        sources[source] += count
    return {"reward_faults": dict(sorted(kinds.items())), "source_faults": dict(sorted(sources.items()))}


def first_faults(groups: Iterable[Group]) -> dict[str, str]:
    """Return the first reward fault of each kind: its task and what happened."""
    found: dict[str, str] = {}
    for r in (r for group in groups for r in group.rollouts if r.error is not None):
        found.setdefault(r.fault or "unknown", f"task {r.task_id}: {r.error}")
    return found
