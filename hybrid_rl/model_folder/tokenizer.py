"""A model folder's tokenizer, read as tokenizer.json says, and the tokens that end an answer."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybrid_rl.model_folder.read import FROM_FOLDER, ModelError, read_config, read_generation, reason
from hybrid_rl.processes.bounded import SECONDS, Begin, Overrun, bounded

# What tokenizers split differently: digits, runs of blanks and newlines, punctuation, contractions, capitals, other scripts
PROBE = "In 2024, 12345 people DON'T pay $3.50…\n\n\tif x>=10:   # it's `code`, I'll say\r\n  naïve café 你好 Привет 🙂 (a)[b]{c}<d> \n"
ANSWER = "an answer"


def read_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Return the folder's tokenizer; where there is a tokenizer.json, its ids and texts are that file's.

    Raises ModelError for a folder without one that can be used.
    """
    tokenizer = _load(AutoTokenizer, folder)
    file = Path(folder) / "tokenizer.json"
    try:
        bounded(lambda begin: _try(tokenizer, file, begin), SECONDS)
    except Overrun as error:
        raise ModelError(f"model.path={folder}: {error.doing} {error.text}; mend it, or use another model") from error
    if file.is_file() and not _reads_as(tokenizer, file):  # some classes of transformers bring a splitting of their own
        tokenizer = _load(PreTrainedTokenizerFast, folder)
        if not _reads_as(tokenizer, file):
            raise ModelError(
                f"model.path={folder}: transformers does not split text as tokenizer.json says (tokenizer_class "
                f"{type(tokenizer).__name__}); make tokenizer_config.json agree with tokenizer.json"
            )
    if not tokenizer.encode("0 a", add_special_tokens=False):  # without files transformers makes one that knows no text
        raise ModelError(
            f"model.path={folder} has no tokenizer; copy its tokenizer.json and tokenizer_config.json into the folder"
        )
    if tokenizer.chat_template is None:
        raise ModelError(
            f"model.path={folder}: the tokenizer has no chat template; add chat_template.jinja to the folder"
        )
    config = read_config(folder)
    if (rows := config.get_text_config().vocab_size) < tokenizer.vocab_size:
        raise ModelError(
            f"model.path={folder}: the tokenizer has {tokenizer.vocab_size} tokens and the model {rows}; they do not belong together"
        )
    end_ids(tokenizer, read_generation(folder, config), rows, str(folder))
    return tokenizer


def _load(kind: type, folder: str | Path) -> PreTrainedTokenizerBase:
    try:
        return kind.from_pretrained(folder, **FROM_FOLDER)  # type: ignore[attr-defined]
    except Exception as error:
        raise ModelError(f"model.path={folder}: its tokenizer cannot be loaded: {reason(error)}") from error


def _try(tokenizer: PreTrainedTokenizerBase, file: Path, begin: Begin) -> None:
    """Run the programs that came with the folder, the regular expressions of the tokenizer and the chat template, once."""
    begin("its tokenizer")
    tokenizer.encode(PROBE, add_special_tokens=False)
    if file.is_file():
        _reads_as(tokenizer, file)
    begin("its chat template")
    _closing(tokenizer, str(tokenizer.chat_template))


def _reads_as(tokenizer: PreTrainedTokenizerBase, file: Path) -> bool:
    own = Tokenizer.from_file(str(file))
    own.no_truncation()
    own.no_padding()
    ids = own.encode(PROBE, add_special_tokens=False).ids
    text = own.decode(ids, skip_special_tokens=False)
    return tokenizer.encode(PROBE, add_special_tokens=False) == ids and exact_text(ids, tokenizer) == text


def exact_text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of all tokens, special ones too, without the changes that transformers makes to blanks on request of the folder."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def closing(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template puts after an answer, up to the token that ends the turn; the end token where it puts none.

    "" where there is neither.
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
    marks = sorted(
        (t.content for t in tokenizer.added_tokens_decoder.values() if t.content.strip()), key=len, reverse=True
    )
    match = re.match(rf"\s*(?:{'|'.join(map(re.escape, marks))})", after) if found and marks else None
    return match[0] if match else ""


def end_ids(
    tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig, vocabulary: int, folder: str
) -> frozenset[int]:
    """Return every token that ends a completion: the generation config's, the tokenizer's, and the one that ends a rendered turn.

    Raises ModelError where there is none, or one that the model, which knows `vocabulary` tokens, cannot give.
    """
    named: set[int] = {tokenizer.eos_token_id} - {None}
    if text := closing(tokenizer).strip():
        named.add(tokenizer.encode(text, add_special_tokens=False)[-1])
    if beyond := sorted(i for i in named if i >= vocabulary):
        raise ModelError(
            f"model.path={folder}: the end token {tokenizer.convert_ids_to_tokens(beyond[0])} has the id {beyond[0]}, and the model knows "
            f"{vocabulary} tokens; name another eos_token in tokenizer_config.json, or use the tokenizer that belongs to the model"
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
