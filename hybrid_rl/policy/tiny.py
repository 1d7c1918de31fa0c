"""The embedded model: a tiny Qwen3 with a character tokenizer, written as an ordinary Hugging Face folder.

With it the whole system runs anywhere in minutes without a download. Its weights are random, drawn from the seed.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hybrid_rl.config import TinyConfig

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
ROLES = ("system\n", "user\n", "assistant\n")

# The usual chat-markup template: each message between start and end, then the assistant's opening.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def character_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, the chat marks, and `words` as single tokens that decode as text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END, PAD])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in (*ROLES, *words)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def create(folder: Path, config: TinyConfig, seed: int) -> None:
    """Write model and tokenizer to `folder`; the same seed gives the same bytes."""
    tokenizer = character_tokenizer(list(config.words))
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            initializer_range=config.init_std,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    # The pad token is set here and not in the model's configuration, where it would make its embedding a row of zeros:
    # if one is sampled by chance, normalising zeros gives it a gradient thousands of times larger than any other.
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    torch.set_rng_state(generator_state)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # What transformers 4 looks for under other names: without them it would compute other positions, and find no
    # tokenizer.
    set_keys(folder / "config.json", rope_theta=config.rope_theta)
    set_keys(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def set_keys(file: Path, **keys: object) -> None:
    """Set top-level keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | keys, indent=2) + "\n")
