"""What a run and a dry run do with loaded tasks, before the model loads: render all of them, and settle their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.config import Config, data_config
from hybrid_rl.data.draws import make_draws
from hybrid_rl.data.render import Checked, Limits, check_prompts
from hybrid_rl.data.tasks import DataError, TaskSets, check_sizes, load_task_sets
from hybrid_rl.environments.base import Facts, facts_of


def load(config: Config) -> TaskSets:
    """Return the tasks of `data`. Raises DataError for data that cannot be used, and for too few tasks."""
    return load_task_sets(config.data, **_needed(config))


def prepare(config: Config, sets: TaskSets, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Checked:
    """Check that every task can be rendered, fits, and can be drawn. Raises DataError for the first that cannot.

    `vocabulary` is the number of tokens that the model knows. With data.drop_long the result says which tasks to drop.
    """
    data = data_config(config.data)
    limits = Limits(config.rollout.max_prompt_tokens, config.policy.row_tokens, data.drop_long)
    role = environment_of(config).role if config.environment else None
    checked = check_prompts(sets, tokenizer, vocabulary, limits, sft=bool(config.sft.steps), replies=role)
    kept, needed = sets.without(checked.dropped), _needed(config)
    check_sizes(kept, **needed)
    if config.rl.steps:
        make_draws(kept.rl, data, seed=0, at_least=needed["rl_tasks"])
    return replace(checked, notes=[*checked.notes, *_unpaid(config, sets)])


def _unpaid(config: Config, sets: TaskSets) -> Iterator[str]:
    """Yield a line for each part of the reward that is limited to a source which no task has."""
    known = sorted({task.source for task in (*sets.rl, *sets.eval)})
    for name, part in config.reward.items():
        given = part.get("sources") if isinstance(part, Mapping) else None
        for source in [given] if isinstance(given, str) else given or []:
            if source not in known:
                there = ", ".join(s or '""' for s in known)
                yield f"no task is of the source {source!r}, which reward.{name}.sources names; there are: {there}"


def environment_of(config: Config) -> Facts:
    """Return what the class of `environment` says of itself. Raises DataError if it cannot be loaded."""
    if not config.environment:
        return Facts()
    try:
        return facts_of(config.environment)
    except Exception as error:  # a module may raise anything
        raise DataError(
            f"environment._target_={config.environment['_target_']}: {' '.join(str(error).split())}"
        ) from error


def _needed(config: Config) -> dict[str, Any]:
    """Return how many tasks a step needs of each set that is trained on."""
    groups = config.rollout.batch_size // config.rollout.group_size
    return {
        "rl_tasks": groups if config.rl.steps else 0,
        "sft_tasks": config.sft.batch_size if config.sft.steps else 0,
    }
