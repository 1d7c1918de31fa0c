"""PPO's critic in checkpoints and in the loop: a killed run goes on to the same numbers, on any ranks to the same bits."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybrid_rl.algo.ppo_clip import loss as ppo_loss
from hybrid_rl.config import (
    AlgoConfig,
    Config,
    CriticConfig,
    EvalConfig,
    LoraConfig,
    Offload,
    OptimizerConfig,
    PolicyConfig,
    RlConfig,
    RolloutConfig,
)
from hybrid_rl.data import TaskSets
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.policy import lora
from hybrid_rl.policy.critic import Critic
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.roles import make_critic
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.rl import train_rl
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.checkpoint import CheckpointError
from hybrid_rl.run_folder.saver import Saver
from hybrid_rl.types import Task
from tests.policy.test_critic import CLIP, CPU, GAE, critic_of, every_rank, facts, same, whole
from tests.policy.test_sharding import ADVANTAGES, rollouts
from tests.ranks import on_ranks
from tests.sessions import make_session
from tests.updates import rows_of, update

pytestmark = pytest.mark.slow  # each starts several ranks, or whole runs

ROWS = rows_of(row_tokens=60)

# ---- checkpoints -----------------------------------------------------------------------------------------------------


def save_trained(ranks: Ranks, folder: Path, root: Path, updates: int) -> tuple[dict, dict, Tensor]:
    policy, critic, batch = Policy.load(folder, CPU, ROWS, ranks), critic_of(folder, ROWS, ranks), rollouts()
    optimizer = Optimizer(policy.trainable, OptimizerConfig(lr=1e-2), 2, 3)
    update(policy, optimizer, batch, ADVANTAGES, ppo_loss)
    for _ in range(updates):
        critic.update(batch, *facts(batch))
    checkpoint.begin(root, "rl", 1, policy, optimizer, {}, {"critic": (critic.model, critic.optimizer)}).publish(1)
    return whole(critic.model.parameters), whole(critic.optimizer.tensors()), goes_on(critic)


def goes_on(critic: Critic) -> Tensor:
    batch = rollouts()
    critic.update(batch, *facts(batch))
    return critic.values(batch)


def restore_trained(ranks: Ranks, folder: Path, root: Path) -> tuple[dict, dict, Tensor]:
    policy = Policy.load(folder, CPU, rows_of(row_tokens=60, offload=Offload.all), ranks)
    found = ranks.from_main(lambda: checkpoint.latest(root))
    found.restore_policy(policy)
    config = CriticConfig(clip=CLIP, optimizer=OptimizerConfig(lr=1e-3))
    critic = make_critic(policy, config, folder, 10, partial(found.restore_role, "critic"))
    critic.unpark()
    assert critic.optimizer.steps == found.state["critic_optimizer"]["steps"]
    return whole(critic.model.parameters), whole(critic.optimizer.tensors()), goes_on(critic)


@pytest.mark.parametrize(("saving", "reading"), [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_what_any_ranks_saved_comes_back_bit_for_bit_on_any_others(tiny_folder, tmp_path, saving, reading):
    weights, moments, after = every_rank(saving, save_trained, tiny_folder, tmp_path, 2)[0]
    assert len(moments) == 3 * len(weights)
    names = {file.name.partition(".")[0] for file in (tmp_path / "rl_000001").glob("*.safetensors")}
    assert names == {"policy", "optimizer", "critic", "critic_optimizer"}
    for ours in every_rank(reading, restore_trained, tiny_folder, tmp_path):
        assert same(ours[0], weights)
        assert same(ours[1], moments)
        assert torch.equal(ours[2], after) if saving == reading else torch.allclose(ours[2], after, atol=1e-4)


def test_a_checkpoint_from_before_its_first_update(tiny_folder, tmp_path):
    weights, moments, after = save_trained(Ranks(), tiny_folder, tmp_path, 0)
    ours = restore_trained(Ranks(), tiny_folder, tmp_path)
    assert moments == ours[1] == {}
    assert same(ours[0], weights)
    assert torch.equal(ours[2], after)


def without_critic(ranks: Ranks, folder: Path, root: Path) -> str:
    policy = Policy.load(folder, CPU, PolicyConfig(), ranks)
    checkpoint.save(root, "rl", 1, policy, None, {}, 1)
    with pytest.raises(CheckpointError) as caught:
        restore_trained(ranks, folder, root)
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_without_a_critic_is_refused(tiny_folder, tmp_path, world):
    for message in every_rank(world, without_critic, tiny_folder, tmp_path):
        assert "rl_000001 holds no critic" in message


def other_critic(ranks: Ranks, folder: Path, other: Path, root: Path) -> str:
    save_trained(ranks, folder, root, 1)
    policy = Policy.load(folder, CPU, PolicyConfig(), ranks)
    found = ranks.from_main(lambda: checkpoint.latest(root))
    found.restore_policy(policy)
    with pytest.raises(CheckpointError) as caught:
        make_critic(policy, CriticConfig(path=str(other)), folder, 10, partial(found.restore_role, "critic"))
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
def test_another_models_critic_is_refused(folder_of, tmp_path, world):
    for message in every_rank(world, other_critic, folder_of("qwen3"), folder_of("llama"), tmp_path):
        assert message.endswith("holds another model's weights")


@pytest.mark.parametrize("part", ["critic", "critic_optimizer"])
def test_damage_to_its_files_is_found(tiny_folder, tmp_path, part):
    save_trained(Ranks(), tiny_folder, tmp_path, 1)
    file = tmp_path / "rl_000001" / f"{part}.00000-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{part}\.00000-of-00001\.safetensors is missing or damaged"):
        restore_trained(Ranks(), tiny_folder, tmp_path)


# ---- in the loop -----------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


class Dying(Saver):
    die_after = -1

    def save(self, stage, step, optimizer=None, critic=None, **state):
        super().save(stage, step, optimizer, critic, **state)
        if critic:
            critic.park()  # as before every handover
        if step == self.die_after:
            raise Killed


def ppo(
    ranks: Ranks, model_folder: Path, folder: Path, settings: PolicyConfig, reward: str = "hash_of_answer", die_after: int = -1,
    warmup_steps: int = 0, steps: int = 3, silent_by: str = "none",
) -> None:  # fmt: skip
    """An RL stage on the real engine, in `folder`; goes on from the checkpoint there, if there is one, and dies after one it writes."""
    config = Config(
        policy=settings,
        rollout=RolloutConfig(batch_size=8, group_size=2, max_tokens=6, max_prompt_tokens=40, max_replacements=1),
        algo=AlgoConfig(
            advantage=GAE, minibatches=2, epochs=2, silent_by=silent_by,
            critic=CriticConfig(optimizer=OptimizerConfig(lr=1e-3), warmup_steps=warmup_steps),
        ),
        rl=RlConfig(steps=steps, checkpoint_every=1, keep_checkpoints=9, optimizer=OptimizerConfig(lr=1e-3)),
        eval=EvalConfig(max_tasks=2),
    )  # fmt: skip
    resumed = ranks.from_main(lambda: checkpoint.latest(folder / "checkpoints"))
    torch.manual_seed(0)
    policy = Policy.load(model_folder, CPU, settings, ranks)
    if resumed:
        resumed.restore_policy(policy)
    else:  # SFT, say
        optimizer = Optimizer(policy.trainable, OptimizerConfig(lr=1e-2), 1, 3)
        update(policy, optimizer, rollouts(), ADVANTAGES, ppo_loss)
    tasks = {
        name: [Task(f"{name}{i}", ({"role": "user", "content": "x" * (i + 1)},), str(i)) for i in range(8)]
        for name in ("rl", "eval")
    }
    engine = LocalEngine(policy.sampler, policy.end_ids(), 16, 64, CPU, policy.dtype)
    scorer = Scorer({"_target_": f"tests.rewards.{reward}"}, workers=1, timeout=5)
    sets = TaskSets([], tasks["rl"], tasks["eval"])
    s = make_session(config, folder, policy, engine, sets, scorer, resumed=resumed, quiet=True)
    s.saver = Dying(folder / "checkpoints", config, policy, s.metrics, s.progress, s.rollouts)
    s.saver.die_after = die_after
    try:
        if not resumed:
            s.saver.save("rl", 0)
        train_rl(s)
    except Killed:
        pass
    finally:
        scorer.close()
        s.metrics.close()


def lines(folder: Path) -> list[dict]:
    """What was reported, but for what a clock or the machine's memory said."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "memory", "memory_gib", "tokens_per_second")}
        for line in read
    ]


@pytest.mark.parametrize(
    ("world", "settings"),
    [(1, PolicyConfig()), (2, PolicyConfig(offload=Offload.all)), (1, PolicyConfig(lora=LoraConfig(rank=3)))],
    ids=["one rank", "two ranks", "adapters"],
)
def test_a_killed_run_goes_on_to_the_same_numbers(tiny_folder, tmp_path, world, settings):
    """Killed after its second step; and killed before its first, when there was no critic to be saved yet."""
    runs = {"whole": [-1], "killed": [2, -1], "killed early": [0, -1]}
    for name, ends in runs.items():
        (tmp_path / name).mkdir()
        for die_after in ends:
            every_rank(world, ppo, tiny_folder, tmp_path / name, settings, "hash_of_answer", die_after)
    expected = lines(tmp_path / "whole")
    assert [line["step"] for line in expected] == [1, 2, 3]
    assert all(line["value_loss"] > 0 and line["value_grad_norm"] > 0 and line["skipped"] == 0 for line in expected)
    for name in ("killed", "killed early"):
        assert lines(tmp_path / name) == expected
        for part in ("policy", "optimizer", "critic", "critic_optimizer"):
            ours, theirs = (
                load_all(tmp_path / run / "checkpoints" / "rl_000003", part, world) for run in (name, "whole")
            )
            assert same(ours, theirs), part
    begin, end = (load_all(tmp_path / "whole" / "checkpoints" / f"rl_00000{i}", "critic", world) for i in (1, 3))
    assert not same(begin, end)
    if settings.lora.rank:
        assert not any(lora.is_adapter(name) or "base_layer" in name for name in end)


def load_all(folder: Path, part: str, world: int) -> dict[str, Tensor]:
    return {
        f"{i} {name}": t
        for i in range(world)
        for name, t in load_file(folder / f"{part}.{i:05d}-of-{world:05d}.safetensors").items()
    }


def test_it_learns_alone_while_it_warms_up(tiny_folder, tmp_path):
    ppo(Ranks(), tiny_folder, tmp_path, PolicyConfig(), warmup_steps=2)
    first, second, third = (load_all(tmp_path / "checkpoints" / f"rl_00000{i}", "policy", 1) for i in (1, 2, 3))
    assert same(first, load_all(tmp_path / "checkpoints" / "rl_000000", "policy", 1))
    assert same(first, second)
    assert not same(second, third)
    critics = [load_all(tmp_path / "checkpoints" / f"rl_00000{i}", "critic", 1) for i in (1, 2, 3)]
    assert not same(critics[0], critics[1])
    assert [line["value_loss"] > 0 for line in lines(tmp_path)] == [True] * 3


def test_a_step_without_a_signal_saves_the_critic_that_waits(tiny_folder, tmp_path):
    """Every group is silent, so nothing has called for it before the checkpoint is written."""
    on_ranks(2, ppo, tiny_folder, tmp_path, PolicyConfig(offload=Offload.all), "constant", -1, 0, 1, "outcome")
    assert [line["missing_groups"] for line in lines(tmp_path)] == [4]
    policy, critic = (load_all(tmp_path / "checkpoints" / "rl_000001", part, 2) for part in ("policy", "critic"))
    assert critic.pop("0 lm_head.weight").shape == (1, 32)
    assert critic.pop("1 lm_head.weight").shape == (0, 32)
    assert same(critic, policy)
