"""Read a model folder's tokenizer exactly as tokenizer.json defines it, and find the tokens that end a completion."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybrid_rl.model_folder.read import FROM_FOLDER, ModelError, read_config, read_generation, reason
from hybrid_rl.processes.bounded import SECONDS, Begin, Overrun, bounded

# what tokenizers split differently: digits, runs of spaces and newlines, punctuation, contractions, capitals, scripts
PROBE = (
    "In 2024, 12345 people DON'T pay $3.50…\n\n\tif x>=10:   # it's `code`, I'll say\r\n"
    "  naïve café 你好 Привет 🙂 (a)[b]{c}<d> \n"
)
ANSWER = "an answer"


def read_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Return the folder's tokenizer; if there is a tokenizer.json, it splits and decodes text as that file defines.

    Raises ModelError if the folder has no usable tokenizer.
    """
    tokenizer = _load(AutoTokenizer, folder)
    file = Path(folder) / "tokenizer.json"
    try:
        bounded(lambda begin: _try(tokenizer, file, begin), SECONDS)
    except Overrun as error:
        raise ModelError(f"model.path={folder}: {error.doing} {error.text}; repair it, or use another model") from error
    if file.is_file() and not _reads_as(tokenizer, file):  # some classes of transformers split text in their own way
        tokenizer = _load(PreTrainedTokenizerFast, folder)
        if not _reads_as(tokenizer, file):
            raise ModelError(
                f"model.path={folder}: transformers does not split text as tokenizer.json says (tokenizer_class "
                f"{type(tokenizer).__name__}); make tokenizer_config.json agree with tokenizer.json"
            )
    if not tokenizer.encode("0 a", add_special_tokens=False):  # without files transformers makes an empty tokenizer
        raise ModelError(
            f"model.path={folder} has no tokenizer; copy its tokenizer.json and tokenizer_config.json into the folder"
        )
    config = read_config(folder)
    if (rows := config.get_text_config().vocab_size) < tokenizer.vocab_size:
        raise ModelError(
            f"model.path={folder}: the tokenizer has {tokenizer.vocab_size} tokens and the model {rows}; "
            "use the tokenizer that belongs to the model"
        )
    end_ids(tokenizer, read_generation(folder, config), rows, str(folder))
    return tokenizer


def _load(kind: type, folder: str | Path) -> PreTrainedTokenizerBase:
    try:
        return kind.from_pretrained(folder, **FROM_FOLDER)  # type: ignore[attr-defined]
    except Exception as error:
        raise ModelError(f"model.path={folder}: its tokenizer cannot be loaded: {reason(error)}") from error


def _try(tokenizer: PreTrainedTokenizerBase, file: Path, begin: Begin) -> None:
    """Run the folder's programs once: the regular expressions of its tokenizer, and its chat template."""
    begin("its tokenizer")
    tokenizer.encode(PROBE, add_special_tokens=False)
    if file.is_file():
        _reads_as(tokenizer, file)
    begin("its chat template")
    _closing(tokenizer, str(tokenizer.chat_template))


def _reads_as(tokenizer: PreTrainedTokenizerBase, file: Path) -> bool:
    """Return whether the tokenizer splits and decodes PROBE as tokenizer.json defines."""
    own = Tokenizer.from_file(str(file))
    own.no_truncation()
    own.no_padding()
    ids = own.encode(PROBE, add_special_tokens=False).ids
    text = own.decode(ids, skip_special_tokens=False)
    return tokenizer.encode(PROBE, add_special_tokens=False) == ids and exact_text(ids, tokenizer) == text


def exact_text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of all tokens, special ones included, without the clean-up of spaces that folders request."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def closing(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template puts after an answer, up to the token that ends the turn.

    If it puts nothing there, return the tokenizer's end token, or "" if there is none.
    """
    return _closing(tokenizer, str(tokenizer.chat_template)) or str(tokenizer.eos_token or "")


@lru_cache(maxsize=4)
def _closing(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": ANSWER}]
    try:
        rendered = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except MemoryError:
        raise
    except Exception:  # the template is a program that came with the model: it may refuse this conversation
        return ""
    _, found, after = rendered.rpartition(ANSWER)
    return first_mark(after, tokenizer) if found else ""


def first_mark(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the added token that a text begins with, and the blanks before it; "" if it begins with another text."""
    marks = sorted(
        (t.content for t in tokenizer.added_tokens_decoder.values() if t.content.strip()), key=len, reverse=True
    )
    match = re.match(rf"\s*(?:{'|'.join(map(re.escape, marks))})", text) if marks else None
    return match[0] if match else ""


def end_ids(
    tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig, vocabulary: int, folder: str
) -> frozenset[int]:
    """Return the ids that end a completion: those of generation config and tokenizer, and the end of a rendered turn.

    Raises ModelError if there is none, or if one is not among the `vocabulary` tokens of the model.
    """
    named: set[int] = {tokenizer.eos_token_id} - {None}
    if text := closing(tokenizer).strip():
        named.add(tokenizer.encode(text, add_special_tokens=False)[-1])
    if beyond := sorted(i for i in named if i >= vocabulary):
        raise ModelError(
            f"model.path={folder}: the end token {tokenizer.convert_ids_to_tokens(beyond[0])} has the id {beyond[0]}, "
            f"and the model knows {vocabulary} tokens; name another eos_token in tokenizer_config.json, "
            "or use the tokenizer that belongs to the model"
        )
    configured = generation.eos_token_id
    named |= set(configured if isinstance(configured, list) else [configured])
    ids = frozenset(i for i in named if i is not None and i < vocabulary)
    if not ids:
        raise ModelError(
            f"model.path={folder}: no end token is named by its generation config, tokenizer or chat template; "
            "name eos_token in tokenizer_config.json"
        )
    return ids
