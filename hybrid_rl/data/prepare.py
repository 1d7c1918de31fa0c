"""What a run and a dry run do with loaded tasks, before the model loads: render all of them, and settle their order."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from hybrid_rl.config import Config, data_config
from hybrid_rl.data.draws import make_draws
from hybrid_rl.data.render import Checked, check_prompts
from hybrid_rl.data.tasks import TaskSets


def prepare(config: Config, sets: TaskSets, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Checked:
    """Check that every task can be rendered, fits, and can be drawn. Raises DataError for the first that cannot.

    `vocabulary` is the number of tokens that the model knows.
    """
    checked = check_prompts(
        sets,
        tokenizer,
        vocabulary,
        max_tokens=config.rollout.max_prompt_tokens,
        row_tokens=config.policy.row_tokens,
        sft=bool(config.sft.steps),
    )
    if config.rl.steps:
        groups = config.rollout.batch_size // config.rollout.group_size
        make_draws(sets.rl, data_config(config.data), seed=0, at_least=groups)
    return checked
