"""Checkpoints on the disk: whole or not there, damage found, the last N kept, no pickle."""

import errno
import json
import os
import pickle

import pytest
import torch
from safetensors import SafetensorError, safe_open

from hybrid_rl.config import OptimizerConfig
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.checkpoint import CheckpointError
from hybrid_rl.run_folder.metrics import Metrics
from tests.device import DEVICE, in_float32


def trained(policy: Policy, steps: int = 2) -> Optimizer:
    optimizer = Optimizer(policy.trainable, OptimizerConfig(lr=1e-2), 10, 3)
    for step in range(steps):
        for index, p in enumerate(policy.model.parameters()):
            p.grad = torch.full_like(p, 0.1 * (step + 1) * (-1) ** index)
        optimizer.step()
    return optimizer


def save(root, policy, optimizer, step, keep=2, **state):
    checkpoint.save(root, "rl", step, policy, optimizer, state, keep)


@pytest.mark.gpu
def test_weights_moments_and_state_come_back_bit_for_bit(policy, tiny_folder, tmp_path):
    optimizer = trained(policy)
    save(tmp_path, policy, optimizer, 7, version=7, note="ü")
    other = Policy.load(tiny_folder, DEVICE, in_float32())
    fresh = Optimizer(other.trainable, OptimizerConfig(lr=1e-2), 10, 3)
    found = checkpoint.latest(tmp_path)
    found.restore_policy(other)
    found.restore_optimizer(fresh)
    assert found.state["stage"] == "rl"
    assert (found.state["step"], found.state["version"], found.state["note"]) == (7, 7, "ü")
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name])
    for name, tensor in optimizer.tensors().items():
        assert torch.equal(tensor, fresh.tensors()[name])
    assert fresh.tensors().keys() == optimizer.tensors().keys()
    assert fresh.steps == 2
    trained_on, continued = trained_once_more(policy, optimizer), trained_once_more(other, fresh)
    assert all(torch.equal(a, b) for a, b in zip(trained_on, continued, strict=True))


def trained_once_more(policy, optimizer):
    for p in policy.model.parameters():
        p.grad = torch.full_like(p, 0.3)
    optimizer.step()
    return [p.detach().clone() for p in policy.model.parameters()]


def test_the_last_n_are_kept_in_order_of_stage_and_step(policy, tmp_path):
    checkpoint.save(tmp_path, "sft", 500, policy, None, {}, keep=2)
    for step in (2, 10, 9):
        save(tmp_path, policy, None, step)
    assert [f.name for f in checkpoint.complete(tmp_path)] == ["rl_000009", "rl_000010"]
    assert checkpoint.latest(tmp_path).state["step"] == 10


def test_an_incomplete_folder_does_not_count(policy, tmp_path):
    save(tmp_path, policy, None, 1)
    save(tmp_path, policy, None, 2)
    (tmp_path / "rl_000002" / "COMPLETE").unlink()
    (tmp_path / ".rl_000003.tmp").mkdir()
    assert checkpoint.latest(tmp_path).state["step"] == 1


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
@pytest.mark.parametrize(
    "file", ["policy.00000-of-00001.safetensors", "optimizer.00000-of-00001.safetensors", "state.json"]
)
def test_damage_is_found_and_named(policy, tmp_path, file, damage):
    optimizer = trained(policy)
    save(tmp_path, policy, optimizer, 1)
    found = checkpoint.latest(tmp_path)
    path = tmp_path / "rl_000001" / file
    content = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(CheckpointError, match=f"{file} is missing or damaged"):
        found.restore_policy(policy)


def test_another_models_weights_are_refused(policy, folder_of, tmp_path):
    save(tmp_path, policy, None, 1)
    with pytest.raises(CheckpointError, match="another model's weights"):
        checkpoint.latest(tmp_path).restore_policy(Policy.load(folder_of("llama"), torch.device("cpu")))


@pytest.mark.parametrize(
    "target", ["hybrid_rl.run_folder.checkpoint.os.fsync", "hybrid_rl.run_folder.checkpoint.save_file"]
)
def test_a_full_disk_keeps_the_checkpoint_before_and_says_so(policy, tmp_path, monkeypatch, target):
    save(tmp_path, policy, None, 1)

    def full(*_, **__):
        if target.endswith("save_file"):
            raise SafetensorError("I/O error: No space left on device (os error 28)")  # what safetensors makes of it
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(target, full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, policy, None, 2)
    monkeypatch.undo()
    assert [f.name for f in tmp_path.iterdir()] == ["rl_000001"]
    checkpoint.latest(tmp_path).restore_policy(policy)


def test_a_checkpoint_of_the_same_step_is_replaced_whole(policy, tmp_path):
    """The folder of a step that is written again (a resumed run) is replaced whole."""
    save(tmp_path, policy, None, 1, attempt=1)
    save(tmp_path, policy, None, 1, attempt=2)
    assert checkpoint.latest(tmp_path).state["attempt"] == 2


def test_a_checkpoint_from_before_the_first_step_has_no_moments(policy, tmp_path):
    save(tmp_path, policy, trained(policy, steps=0), 1)
    found, fresh = checkpoint.latest(tmp_path), Optimizer(policy.trainable, OptimizerConfig(lr=1e-2), 10, 3)
    found.restore_policy(policy)
    found.restore_optimizer(fresh)
    assert (fresh.tensors(), fresh.steps) == ({}, 0)


@pytest.mark.parametrize("content", [None, b'{"stage": "r'])
def test_a_state_that_cannot_be_read_is_named(policy, tmp_path, content):
    save(tmp_path, policy, None, 1)
    state = tmp_path / "rl_000001" / "state.json"
    state.unlink() if content is None else state.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.json is missing or damaged"):
        checkpoint.latest(tmp_path)


def test_a_file_says_which_rows_it_holds(policy, tmp_path):
    save(tmp_path, policy, None, 1)
    with safe_open(tmp_path / "rl_000001" / "policy.00000-of-00001.safetensors", "pt") as file:
        assert {name: json.loads(text) for name, text in file.metadata().items()} == {
            name: [0, list(p.shape)] for name, p in policy.trainable.items()
        }


def test_nothing_in_a_checkpoint_is_a_pickle(policy, tmp_path):
    save(tmp_path, policy, trained(policy), 1)
    for file in (tmp_path / "rl_000001").iterdir():
        with pytest.raises(Exception):  # noqa: B017, PT011
            pickle.loads(file.read_bytes())  # noqa: S301


def test_metrics_go_on_exactly_where_the_checkpoint_stood(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = Metrics(path)
    for step in range(5):
        first.write("rl", step=step, value=float("nan"))
    first.close()
    path.open("a").write('{"stage": "rl", "st')  # killed in the middle of a line
    second = Metrics(path, keep_lines=3)
    second.write("rl", step=3, value=1.0)
    second.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert lines[2] == '{"stage": "rl", "step": 2, "value": null}'
    with pytest.raises(ValueError, match="has 4 lines"):
        Metrics(path, keep_lines=9)
