"""Measure TRL's GRPOTrainer for vs_trl.py: the same model folder, tasks and step, in TRL's own environment.

    python -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0  # a CPU build will do
    .venv-trl/bin/pip install trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0
    .venv-trl/bin/python benchmarks/trl_side.py --model FOLDER --prompts tasks.jsonl --steps 20 --warmup 3 --out x.json

It does not import hybrid_rl. Each line of the tasks is {"messages": [...], "answer": "..."}, in training order.
"""

# mypy: disallow-subclassing-any=False, disallow-untyped-calls=False, ignore-missing-imports

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
import warnings
from difflib import SequenceMatcher
from pathlib import Path
from statistics import mean, median
from typing import Any


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--prompts", required=True, type=Path, help="tasks as JSON lines")
    parser.add_argument("--steps", required=True, type=int, help="optimizer steps, warm-up included")
    parser.add_argument("--warmup", required=True, type=int, help="first steps that are not measured")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=128, help="completions a step")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--overrides", type=json.loads, default={}, help="GRPOConfig fields as JSON, to try an alternative"
    )
    return parser.parse_args()


args = arguments()
# the libraries read these once when they load, so they are set before the imports
os.environ.update(
    OMP_NUM_THREADS=str(args.threads), MKL_NUM_THREADS=str(args.threads), RAYON_NUM_THREADS=str(args.threads)
)
os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    TRL_EXPERIMENTAL_SILENCE="1",
)

import accelerate  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

transformers.utils.logging.disable_progress_bar()
warnings.filterwarnings("ignore", category=FutureWarning)  # TRL uses names that transformers has renamed
ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


def similarity(completion: str, answer: str) -> float:
    """Return difflib's ratio of the text in the first answer tag and the answer; 0 without a tag."""
    found = ANSWER.search(completion)
    return SequenceMatcher(None, found.group(1).strip(), answer).ratio() if found else 0.0


class Measured(GRPOTrainer):
    """A GRPOTrainer that records the seconds and the sampled tokens of each sampled batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.generate_seconds: list[float] = []
        self.tokens: list[int] = []

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        self.generate_seconds.append(time.perf_counter() - start)
        self.tokens.append(sum(len(ids) for ids in result[0]))
        return result


class Clock(TrainerCallback):
    """A callback that records wall and CPU seconds at the end of each optimizer step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def _tick(self) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tick()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._tick()


def settings(folder: str) -> GRPOConfig:
    """Return the settings of the comparison, with the fastest of TRL's options measured on one CPU thread."""
    fields: dict[str, Any] = dict(  # noqa: C408 - reads as the call it becomes
        # The step: batch_size / group_size prompts in the given order, one optimizer step a batch, no reference model.
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        shuffle_dataset=False,
        max_steps=args.steps,
        temperature=args.temperature,
        top_p=1.0,
        top_k=0,
        mask_truncated_completions=False,
        loss_type="dapo",
        scale_rewards="none",
        beta=0.0,
        num_iterations=1,
        epsilon=0.2,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        # Batch splits in CPU seconds a step (tiny model, 3,500 tokens a step, the same in all; best of 2-5 runs, which
        # differ by 10 %): 128 x 1 1.20, 32 x 4 1.22, 16 x 8 1.25, 64 x 2 1.26. Others: eager attention 1.32 (1.22 at
        # 32 x 4), static cache 1.23 (1.41 in its second run), adamw_torch 1.34, continuous batching 8.3; torch.compile
        # had not done six steps after 110 s.
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=1,
        # Float32 on the CPU. TRL's own defaults are bfloat16 and gradient checkpointing.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        disable_dropout=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        # No saving, evaluation or logging.
        output_dir=folder,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_nan_inf_filter=False,
        dataloader_pin_memory=False,
        seed=args.seed,
    )
    config = GRPOConfig(**(fields | args.overrides))
    if (
        config.generation_batch_size != args.batch_size
        or config.steps_per_generation != config.gradient_accumulation_steps
    ):
        raise SystemExit(
            f"the settings do not make one optimizer step of {args.batch_size} completions: {args.overrides}"
        )
    return config


def main() -> None:
    """Train and write the measurements to --out."""
    torch.set_num_threads(args.threads)
    tasks = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    needed = args.steps * args.batch_size // args.group_size
    if len(tasks) < needed or not 0 <= args.warmup < args.steps:
        raise SystemExit(f"{args.steps} steps need {needed} tasks ({len(tasks)} given) and a warm-up shorter than that")
    rewards: list[float] = []

    def reward(completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any) -> list[float]:
        scores = [
            similarity(completion[0]["content"], truth) for completion, truth in zip(completions, answer, strict=True)
        ]
        rewards.append(mean(scores))
        return scores

    clock = Clock()
    data = Dataset.from_list([{"prompt": task["messages"], "answer": task["answer"]} for task in tasks[:needed]])
    with tempfile.TemporaryDirectory() as folder:
        trainer = Measured(
            model=args.model, reward_funcs=reward, args=settings(folder), train_dataset=data, callbacks=[clock]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    measured = slice(args.warmup, None)
    steps = [end - start for start, end in zip(clock.wall, clock.wall[1:], strict=False)][measured]
    cpu = [end - start for start, end in zip(clock.cpu, clock.cpu[1:], strict=False)][measured]
    if not len(rewards) == len(trainer.tokens) == args.steps == len(steps) + args.warmup:
        raise RuntimeError(
            f"not one batch a step: {len(rewards)} batches and {len(clock.wall) - 1} steps, {args.steps} asked for"
        )
    versions = {module.__name__: module.__version__ for module in (trl, transformers, accelerate, torch)}
    result = {
        "seconds_per_step": median(steps),
        "cpu_seconds_per_step": median(cpu),
        "steps": steps,
        "generate_seconds": median(trainer.generate_seconds[measured]),
        "tokens_per_step": mean(trainer.tokens[measured]),
        "reward": rewards,
        "versions": versions,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
