"""How long a sample may be: tables of positions end, some rotary ones follow a row's longest sample, others only warn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybrid_rl.config import AlgoConfig, Config, CriticConfig, ModelConfig, PolicyConfig, RolloutConfig, SftConfig
from hybrid_rl.data.render import Limits, check_prompts
from hybrid_rl.data.tasks import TaskSets
from hybrid_rl.plan import print_plan
from hybrid_rl.policy import load
from hybrid_rl.policy.model import ModelError, Policy, read_tokenizer
from hybrid_rl.preflight.budget import check_lengths, measure
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.report.console import Console
from hybrid_rl.types import Task
from tests.policy.test_layout import LAYOUTS, plain, rollout, run

CPU = torch.device("cpu")
GAE = {"_target_": "hybrid_rl.algo.gae.advantages"}

# name → tokens that the run may have and the reason that more are refused
HARD = {
    "gpt2": (32, r"has no position beyond 32 tokens \(a table of positions, max_position_embeddings\)"),
    "gptj": (32, r"has no position beyond 32 tokens"),
    "opt": (32, r"has no position beyond 32 tokens"),
    "phi3_longrope": (
        16,
        r"longest sample has more than 16 tokens \(rope_type longrope, original_max_position_embeddings\)",
    ),
    "llama_dynamic": (16, r"longest sample has more than 16 tokens \(rope_type dynamic, max_position_embeddings\)"),
    "llama4": (24, r"attends in chunks beyond 24 tokens \(attention_chunk_size\)"),
}


def of_length(path: Path | None, longest: int, **more) -> Config:
    return Config(
        model=ModelConfig(path=path and str(path)),
        rollout=RolloutConfig(max_prompt_tokens=longest - 4, max_tokens=4),
        **more,
    )


@pytest.mark.parametrize("name", HARD)
def test_the_longest_sample_must_not_cross_the_limit(folder_of, name: str) -> None:
    folder, (limit, reason) = folder_of(name), HARD[name]
    sizes = measure(of_length(folder, limit), folder)
    assert check_lengths(of_length(folder, limit), sizes, limit) == []
    with pytest.raises(
        ModelError,
        match=rf"^model.path={folder} .*{reason}.*, and rollout.max_prompt_tokens={limit - 3} \+ .*=4 = {limit + 1}",
    ):
        check_lengths(of_length(folder, limit + 1), sizes, 0)
    with pytest.raises(ModelError, match=rf"{reason}.*, and the longest demonstration has {limit + 1}; drop"):
        check_lengths(of_length(folder, limit), sizes, limit + 1)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj", "phi3_longrope", "llama_dynamic"])
def test_samples_up_to_the_limit_are_computed_as_plain_transformers_does(folder_of, reference_of, name: str) -> None:
    limit = HARD[name][0]
    policy = Policy.load(folder_of(name), CPU)
    rollouts = [rollout(range(4), [(True, range(5))]), rollout(range(limit - 8), [(True, range(8))], 1)]
    expected, _ = plain(reference_of(folder_of(name)).model, rollouts)
    for layout in LAYOUTS:
        torch.testing.assert_close(run(policy, rollouts, layout, 512)[0], expected, rtol=0, atol=1e-5)


def test_rotary_positions_beyond_what_a_model_was_made_for_are_a_note(folder_of) -> None:
    folder = folder_of("llama")
    sizes = measure(of_length(folder, 512), folder)
    assert check_lengths(of_length(folder, 512), sizes, 512) == []
    said = check_lengths(of_length(folder, 513), sizes, 514)
    limit = f"model.path={folder} was not made for more than 512 tokens (max_position_embeddings)"
    assert said == [
        f"{limit}, and rollout.max_prompt_tokens=509 + rollout.max_tokens=4 = 513",
        f"{limit}, and the longest demonstration has 514",
    ]


def test_stretched_rotary_positions_count_their_factor(folder_of) -> None:
    folder = folder_of("qwen2_yarn")  # 4 × 32
    sizes = measure(of_length(folder, 128), folder)
    assert check_lengths(of_length(folder, 128), sizes, 0) == []
    assert len(check_lengths(of_length(folder, 129), sizes, 0)) == 1


def test_teacher_and_critic_have_limits_of_their_own(folder_of) -> None:
    config = of_length(
        folder_of("llama"), 33, algo=AlgoConfig(advantage=GAE, critic=CriticConfig(path=str(folder_of("gpt2"))))
    )
    sizes = measure(config, folder_of("llama"))
    with pytest.raises(ModelError, match=rf"algo.critic.path={folder_of('gpt2')} has no position beyond 32 tokens"):
        check_lengths(config, sizes, 0)
    shorter = of_length(folder_of("llama"), 32, algo=config.algo)
    assert check_lengths(shorter, sizes, 500) == []  # demonstrations are the policy's alone


def test_a_scheme_that_no_rule_knows_is_found_by_its_numbers(folder_of, monkeypatch) -> None:
    monkeypatch.setattr(load, "limits", lambda model: [])
    for name in ("phi3_longrope", "llama_dynamic"):
        with pytest.raises(ModelError, match="changes all positions of a row with its longest sample"):
            Policy.load(folder_of(name), CPU)
        Policy.load(folder_of(name), CPU, PolicyConfig(row_tokens=16))


def test_longrope_as_published(folder_of, tmp_path) -> None:
    """With rope_scaling and the original length at the top of config.json."""
    folder = folder_of("phi3_longrope")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "rope_scaling": {"type": "longrope", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]},
        "original_max_position_embeddings": 16, "rope_theta": 10000.0,
    }  # fmt: skip
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="more than 16 tokens"):
        check_lengths(of_length(tmp_path, 17), measure(of_length(tmp_path, 17), tmp_path), 0)


def test_layers_of_another_kind_are_told_without_weights(folder_of) -> None:
    with pytest.raises(ModelError, match=r"layers of linear_attention; only full_attention and sliding_attention"):
        measure(of_length(folder_of("mamba"), 32), folder_of("mamba"))


def test_the_longest_demonstration_is_measured(tiny_folder) -> None:
    def task(name: str, prompt: str, answer: str | None) -> Task:
        return Task(name, ({"role": "user", "content": prompt},), "", demonstration=answer)

    tokenizer = read_tokenizer(tiny_folder)
    sets = TaskSets(
        [task("a", "x", "abc"), task("b", "xy", "abcdefg"), task("c", "x" * 9, "a")], [task("d", "x" * 60, None)], []
    )
    chars = {
        name: len(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "x" * n}], add_generation_prompt=True, return_dict=False
            )
        )
        for name, n in (("b", 2), ("c", 9))
    }
    longest = max(chars["b"] + 7, chars["c"] + 1) + 1
    assert check_prompts(sets, tokenizer, 1000, Limits(200, 512), sft=True).longest == longest
    assert check_prompts(sets, tokenizer, 1000, Limits(200, 512), sft=False).longest == 0


@pytest.mark.parametrize(
    ("name", "longest", "said"), [("gpt2", 100, "has no position beyond 32"), ("llama", 600, "note       model.path=")]
)
def test_a_dry_run_says_so(folder_of, tmp_path, capsys, name: str, longest: int, said: str) -> None:
    """Before anything else is loaded."""
    for part, first in (("rl", 0), ("eval", 8), ("sft", 16)):
        lines = (json.dumps({"prompt": f"{i}", "answer": "x", "demonstration": "y"}) for i in range(first, first + 8))
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    config = of_length(
        folder_of(name), longest, policy=PolicyConfig(row_tokens=700), sft=SftConfig(steps=1, batch_size=2)
    )
    config.data = {"_target_": "hybrid_rl.data.files.load_tasks"} | {
        part: str(tmp_path / f"{part}.jsonl") for part in ("rl", "eval", "sft")
    }
    config.reward = {"_target_": "tests.rewards.hash_of_answer"}
    config.rollout.batch_size, config.rollout.group_size, config.device = 4, 2, "cpu"
    try:
        print_plan(config, tmp_path / "out", Console(), Ranks())
    except ModelError as error:
        print(error)
    assert said in capsys.readouterr().out


def test_the_tiny_model_is_named_by_its_setting(tmp_path, tiny_folder) -> None:
    config = of_length(None, 10_000)
    said = check_lengths(config, measure(config, tiny_folder), 0)
    assert [
        line.startswith(f"model.tiny.max_positions={config.model.tiny.max_positions} was not made for") for line in said
    ] == [True]
