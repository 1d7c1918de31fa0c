"""Write and read rollouts: one parquet file per step or evaluation, one row per rollout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from hybrid_rl.run_folder.background import Background
from hybrid_rl.run_folder.files import atomic_file
from hybrid_rl.types import Group, Rollout

SCHEMA = pa.schema(
    [
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("completion", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        # what the last update that saw the rollout began with; null: there was none. log π_θ − log π_old, nats
        pa.field("log_ratios", pa.list_(pa.float16())),
        pa.field("entropies", pa.list_(pa.float16())),  # of the policy's distributions, nats
        pa.field("advantages", pa.list_(pa.float16())),  # null: every token has `advantage`
        pa.field("versions", pa.list_(pa.struct([("version", pa.int64()), ("count", pa.int64())])), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("outcome", pa.float64()),  # what the reward function returned
        pa.field("reward", pa.float64()),  # the outcome and what the run added to it; null: it failed, see error
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("measures", pa.map_(pa.string(), pa.float64()), nullable=False),  # logged and not paid
        pa.field("extracted", pa.string()),  # the answer that the reward found in the completion
        pa.field("advantage", pa.float64()),  # null: none was computed
        pa.field("trained", pa.bool_(), nullable=False),  # whether an update used at least one of its tokens
        pa.field("error", pa.string()),
        pa.field("fault", pa.string()),  # the kind of the error, as it is counted
    ]
)


TOKENS = ("log_ratios", "entropies", "advantages")
Columns = Mapping[str, np.ndarray]  # name in TOKENS → a number for each sampled token of a rollout
HALF = 65504.0  # the largest float16


@dataclass(frozen=True, slots=True)
class RolloutFiles:
    """The rollouts of a run's steps and evaluations in `folder`; only rank 0, which is `main`, writes them."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    main: bool = True
    keep_steps: int = 0  # the newest so many and the first; 0: all
    background: Background = field(default_factory=Background)

    def save(
        self,
        name: str,
        groups: Sequence[Group],
        advantages: Mapping[tuple[int, int], float] = MappingProxyType({}),
        trained: Collection[tuple[int, int]] = (),
        tokens: Mapping[tuple[int, int], Columns] = MappingProxyType({}),
        wait: bool = True,
    ) -> None:
        """Write <name>.parquet, with what write_rollouts takes by (group id, index).

        Without `wait` it is written while the caller goes on, who may not change the groups; a full disk then shows in
        the next call, at the latest in `flush`.
        """
        if self.main:
            prompts, path = prompts_of(groups, self.tokenizer), self.folder / f"{name}.parquet"
            self.background.put(lambda: write_rollouts(path, groups, prompts, advantages, trained, tokens))
            if wait:
                self.flush()

    def remove_old(self, step: int) -> None:
        """Remove those of RL steps before `step` that are not to be kept, after what is still to be written."""
        if self.main:
            self.background.put(lambda: remove_old(self.folder, step, self.keep_steps))

    def flush(self) -> None:
        """Wait until every file is on the disk. Raises the error of one that cannot be written."""
        self.background.flush()


def prompts_of(groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the prompt of each group as text."""
    first = (group.rollouts[0] for group in groups)
    return [str(tokenizer.decode(rollout.token_ids[: rollout.prompt_length].tolist())) for rollout in first]


def write_rollouts(
    path: Path,
    groups: Sequence[Group],
    prompts: Sequence[str],
    advantages: Mapping[tuple[int, int], float],
    trained: Collection[tuple[int, int]],
    tokens: Mapping[tuple[int, int], Columns] = MappingProxyType({}),
) -> None:
    """Write the groups' rollouts, in order, to `path`, atomically.

    `prompts` has one rendered text per group. `advantages` maps (group id, index) to a number and may lack rollouts;
    `trained` holds the keys of the rollouts that an update used, `tokens` numbers of the sampled tokens of some rollouts,
    by the columns of TOKENS. Raises ValueError if one of them names other rollouts.
    """
    if len(prompts) != len(groups):
        raise ValueError(f"{len(prompts)} prompts for {len(groups)} groups")
    rows = [
        (group, prompt, rollout) for group, prompt in zip(groups, prompts, strict=True) for rollout in group.rollouts
    ]
    trained = frozenset(trained)
    unknown = (advantages.keys() | trained | tokens.keys()) - {(g.id, r.index) for g, _, r in rows}
    if unknown:
        raise ValueError(
            f"advantages, trained or tokens name rollouts that are not in the groups: {sorted(unknown)[:5]}"
        )
    columns: dict[str, list[Any] | pa.ListArray] = {
        "task_id": [_text(g.task.id) for g, _, _ in rows],
        "source": [_text(g.task.source) for g, _, _ in rows],
        "group_id": [g.id for g, _, _ in rows],
        "index": [r.index for _, _, r in rows],
        "seed": [r.seed for _, _, r in rows],
        "prompt": [_text(prompt) for _, prompt, _ in rows],
        "completion": [_text(r.completion) for _, _, r in rows],
        "answer": [_text(g.task.answer) for g, _, _ in rows],
        "token_ids": _lists([r.token_ids for _, _, r in rows], np.int32),
        "prompt_length": [r.prompt_length for _, _, r in rows],
        "loss_mask": _lists([r.loss_mask for _, _, r in rows], np.bool_),
        "logprobs": _lists([r.logprobs for _, _, r in rows], np.float32),
        **{
            name: _lists([_spread(r, tokens.get((g.id, r.index), {}).get(name)) for g, _, r in rows], np.float16)
            for name in TOKENS
        },
        "versions": [[{"version": version, "count": count} for version, count in r.versions] for _, _, r in rows],
        "finish_reason": [r.finish_reason for _, _, r in rows],
        "outcome": [r.outcome for _, _, r in rows],
        "reward": [r.reward for _, _, r in rows],
        "reward_parts": [[(_text(name), value) for name, value in r.reward_parts.items()] for _, _, r in rows],
        "measures": [[(_text(name), value) for name, value in r.measures.items()] for _, _, r in rows],
        "extracted": [None if r.extracted is None else _text(r.extracted) for _, _, r in rows],
        "advantage": [advantages.get((g.id, r.index)) for g, _, r in rows],
        "trained": [(g.id, r.index) in trained for g, _, r in rows],
        "error": [None if r.error is None else _text(r.error) for _, _, r in rows],
        "fault": [r.fault for _, _, r in rows],
    }
    table = pa.table(columns, schema=SCHEMA)
    with atomic_file(Path(path)) as file:
        pq.write_table(table, file, compression="zstd")


def remove_old(folder: Path, step: int, keep: int) -> None:
    """Remove rollouts and evaluations of RL steps up to `step`, except the newest `keep` and the first; 0: keep all."""
    for path in folder.glob("*step_*.parquet") if keep else ():
        number = path.stem.rpartition("_")[2]
        if number.isdecimal() and 1 < int(number) <= step - keep:
            path.unlink(missing_ok=True)


def read_rollouts(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return one dict per rollout, with the given columns (None: all).

    `versions` are (version, count) pairs, `reward_parts` and `measures` dicts; measures are {} in a file from before
    there were any. Raises FileNotFoundError, or pyarrow.ArrowInvalid if the file is incomplete.
    """
    # not read_table: it takes a folder name like "key=value" as a partition column
    with pq.ParquetFile(path) as file:
        # columns that the file does not have are left out
        rows: list[dict[str, Any]] = file.read(columns=None if columns is None else list(columns)).to_pylist()
    for row in rows:
        if "versions" in row:
            row["versions"] = [(segment["version"], segment["count"]) for segment in row["versions"]]
        if "reward_parts" in row:
            row["reward_parts"] = dict(row["reward_parts"])
        if columns is None or "measures" in columns:
            row["measures"] = dict(row.get("measures") or ())
    return rows


def as_rollout(row: dict[str, Any]) -> Rollout:
    """Return the rollout of a complete row of read_rollouts; its log-probabilities are rounded to float32."""
    ids = np.array(row["token_ids"], np.int32)
    rollout = Rollout(row["task_id"], row["group_id"], row["index"], row["seed"], ids[: row["prompt_length"]])
    rollout.token_ids, rollout.loss_mask = ids, np.array(row["loss_mask"], bool)
    rollout.logprobs = np.array(row["logprobs"], np.float32)
    rollout.versions, rollout.finish_reason = row["versions"], row["finish_reason"]
    rollout.completion = row["completion"]
    rollout.outcome, rollout.reward, rollout.reward_parts = row["outcome"], row["reward"], row["reward_parts"]
    rollout.measures, rollout.extracted = row["measures"], row.get("extracted")
    rollout.error, rollout.fault = row["error"], row["fault"]
    return rollout


def _spread(rollout: Rollout, values: np.ndarray | None) -> np.ndarray | None:
    """Return the sampled tokens' values at their places among all tokens, 0 elsewhere, within the range of float16."""
    if values is None:
        return None
    whole = np.zeros(len(rollout.token_ids), np.float16)
    whole[rollout.loss_mask] = np.clip(values, -HALF, HALF)
    return whole


def _lists(arrays: Sequence[np.ndarray | None], dtype: type) -> pa.ListArray:
    """Return a column with an array for each rollout, None as null, without a Python object for each number."""
    missing = np.array([own is None for own in arrays], bool)
    found = [own for own in arrays if own is not None]
    ends = np.cumsum([0, *(0 if own is None else len(own) for own in arrays)])
    values = pa.array(np.concatenate([np.zeros(0, dtype), *found]))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values, mask=pa.array(missing))


def _text(text: str) -> str:
    """Return the text with lone surrogates replaced, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
