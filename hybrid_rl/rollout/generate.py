"""Tasks to scored groups: what training and evaluation have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from transformers import PreTrainedTokenizerBase

from hybrid_rl.data.render import completion_text, prompt_ids
from hybrid_rl.engine.base import Engine, EngineDied, EngineError, Request, Sampling, request_seed
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.types import Group, Rollout, Task


def make_group(
    id: int, task: Task, size: int, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, *seed_facts: object
) -> Group:
    """A group of empty rollouts: the prompt rendered once, a random stream for each sample."""
    ids = prompt_ids(task, tokenizer, max_prompt_tokens)
    return Group(id, task, [Rollout(task.id, id, i, request_seed(*seed_facts, i), list(ids)) for i in range(size)])


def sample_groups(
    engine: Engine, groups: Sequence[Group], sampling: Sampling, tokenizer: PreTrainedTokenizerBase, scorer: Scorer, ranks: Ranks,
    on_completion: Callable[[int], None] = lambda count: None, revive: Callable[[EngineDied], None] | None = None,
) -> int:  # fmt: skip
    """Fill every rollout with a completion and its reward; each is scored while others are still sampled.

    A rank samples and scores its contiguous share, then every rank gets all of them. A request's seed alone decides its tokens, so
    who samples it makes no difference. Returns the number of rewards that failed; those rollouts carry `error` and no reward.

    Where the engine of a rank dies, all ranks call `revive` together, and what the dead one still owed is asked for again.
    """
    order = [(group, rollout) for group in groups for rollout in group.rollouts]
    mine = ranks.share(len(order), engine.team.world)
    waiting = {i: Request(i, order[i][1].token_ids[: order[i][1].prompt_length], order[i][1].seed) for i in mine}
    while True:
        death: EngineDied | None = None
        try:
            for completion in engine.generate(list(waiting.values()), sampling):
                group, rollout = order[completion.id]
                try:
                    rollout.add_sampled(completion.token_ids, completion.logprobs, completion.versions)
                except ValueError as error:  # its weights are broken, or it is: nothing that it samples can be trusted
                    raise EngineError(
                        f"the engine's completion of group {group.id}, rollout {rollout.index}: {error}"
                    ) from error
                rollout.finish(
                    completion.finish_reason,
                    completion_text(completion.token_ids, tokenizer, completion.finish_reason == "stop"),
                )
                scorer.submit(rollout, group.task)
                on_completion(ranks.world // engine.team.world)  # the others are about as far
                del waiting[completion.id]
        except EngineDied as error:
            death = error
        deaths = [error for error in ranks.all_gather(death) if error]
        if not deaths:
            break
        if revive is None:
            raise death or deaths[0]
        revive(deaths[0])
    scorer.finish()
    if ranks.world > 1:
        everyone = chain.from_iterable(ranks.all_gather([order[i][1] for i in mine]))
        for group in groups:
            group.rollouts = [next(everyone) for _ in group.rollouts]
    return sum(rollout.error is not None for group in groups for rollout in group.rollouts)


def reward_faults(groups: Iterable[Group]) -> Counter[tuple[str, str]]:
    """How many rewards failed, by (source of the task, kind of fault)."""
    failed = ((group, r) for group in groups for r in group.rollouts if r.error is not None)
    return Counter((group.task.source or "unnamed", r.fault or "unknown") for group, r in failed)


def fault_metrics(faults: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """`reward_faults`: counts by kind, `source_faults`: the same ones by the task's source; each in the order of its names."""
    kinds, sources = Counter[str](), Counter[str]()
    for (source, kind), count in faults.items():
        kinds[kind] += count
        sources[source] += count
    return {"reward_faults": dict(sorted(kinds.items())), "source_faults": dict(sorted(sources.items()))}


def first_faults(groups: Iterable[Group]) -> dict[str, str]:
    """Of each kind of reward fault the first: its task and what happened."""
    found: dict[str, str] = {}
    for r in (r for group in groups for r in group.rollouts if r.error is not None):
        found.setdefault(r.fault or "unknown", f"task {r.task_id}: {r.error}")
    return found
