"""What can go wrong on the disk: it is full, files are damaged or gone, or were written by something else. Never a silent restart."""

import json
import re
import resource
import shutil
import time
from pathlib import Path

import pytest

from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.files import write_json
from tests.faults.moments import Moment
from tests.faults.runs import assert_same, copied, folder_of, metrics, run

pytestmark = pytest.mark.slow  # each starts several ranks, or whole runs


def no_more_than(size: int) -> None:
    """Files of this process may not grow beyond `size` bytes: what a full disk does, to one process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def full_for_checkpoints() -> None:
    no_more_than(30_000)


def full_for_everything() -> None:
    no_more_than(3_000)


def vanish() -> None:
    for folder in folder_of(Path()).glob("checkpoints"):
        shutil.rmtree(folder)


def hang() -> None:
    time.sleep(30)


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk_ends_the_run_and_keeps_the_checkpoint_before(wholes, tmp_path, background):
    output = run(
        tmp_path, f"checkpoint.background={background}", moment=Moment("copy", 4, 0.0, full_for_checkpoints), code=1
    )
    last = output.splitlines()[-1]
    assert re.search(
        r"checkpoint .*rl_00000\d could not be written, the one before is untouched: .*File too large", last
    )
    assert not list(folder_of(tmp_path).glob("checkpoints/.*"))
    run(tmp_path, "resume=must")
    assert_same(wholes[1], tmp_path)


@pytest.mark.parametrize("phase", ["rollouts", "export"])
def test_a_full_disk_for_other_files(wholes, tmp_path, phase):
    call = {"rollouts": 5, "export": 0}[phase]
    output = run(tmp_path, moment=Moment(phase, call, 0.0, full_for_everything), code=1)
    assert "File too large" in output.splitlines()[-1]
    run(tmp_path, "resume=must")
    assert_same(wholes[1], tmp_path)


def test_a_full_disk_on_one_rank_ends_both(wholes, tmp_path):
    output = run(tmp_path, ranks=2, moment=Moment("copy", 4, 0.0, full_for_checkpoints), victim=1, code=1)
    assert "could not be written, the one before is untouched" in output
    run(tmp_path, "resume=must", ranks=2)
    assert_same(wholes[2], tmp_path)


def test_a_folder_that_vanishes_while_it_is_written(wholes, tmp_path):
    output = run(tmp_path, moment=Moment("write", 5, 0.0, vanish), code=1)
    assert "could not be written" in output.splitlines()[-1]
    assert "resume=auto: there is no complete checkpoint in" in run(tmp_path, "resume=auto", code=1)  # and RL had begun


def test_a_disk_that_does_not_answer(tmp_path):
    output = run(tmp_path, "checkpoint.timeout=0.5", moment=Moment("write", 3, 0.0, hang), code=1)
    assert output.splitlines()[-1].endswith("the one before is untouched: it took more than checkpoint.timeout=0.5 s")


def test_damage_is_named_and_the_checkpoint_before_goes_on(wholes, tmp_path):
    folder = copied(wholes[1], tmp_path)
    newest = checkpoint.complete(folder / "checkpoints")[-1]
    file = newest / "critic.00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    output = run(tmp_path, f"resume={folder}", code=1)
    assert f"{file} is missing or damaged; delete {newest} to resume from the one before" in output
    shutil.rmtree(newest)
    output = run(tmp_path, f"resume={folder}")
    assert f"resumed: {checkpoint.complete(folder / 'checkpoints')[0].name}" in output
    assert_same(wholes[1], tmp_path)


@pytest.mark.parametrize("what", ["checkpoints", "markers", "lines", "settings", "reference"])
def test_what_is_gone_is_an_error(wholes, tmp_path, what):
    folder = copied(wholes[1], tmp_path)
    (folder / "summary.json").unlink()  # as if it had been killed before its end
    if what == "checkpoints":
        shutil.rmtree(folder / "checkpoints")
    if what == "markers":
        for marker in folder.glob("checkpoints/rl_*/COMPLETE"):
            marker.unlink()
    if what == "lines":
        (folder / "metrics.jsonl").write_text("")
    if what == "settings":
        (folder / "config.yaml").write_text("{")
    if what == "reference":
        shutil.rmtree(folder / "checkpoints" / "reference")
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    output = run(tmp_path, "resume=auto", code=1)
    expected = {
        "checkpoints": "there is no complete checkpoint in",
        "markers": "without COMPLETE); resume=never for a new run",
        "lines": "metrics.jsonl has 0 lines, rl_000005 was saved after",
        "settings": "config.yaml is missing or damaged",
        "reference": "holds no complete reference",
    }
    assert expected[what] in output.splitlines()[-1]
    if what != "reference":  # that is noticed late
        assert {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()} == before


def change(folder, **values) -> None:
    """Other facts in the newest checkpoint's state, as another version would have written them."""
    newest = checkpoint.complete(folder / "checkpoints")[-1]
    state, marker = (json.loads((newest / name).read_text()) for name in ("state.json", "COMPLETE"))
    write_json(newest / "state.json", state | values)
    write_json(newest / "COMPLETE", marker | {"state.json": checkpoint._facts(newest / "state.json")})


def test_another_format_is_refused_and_other_code_is_said(wholes, tmp_path):
    folder = copied(wholes[1], tmp_path)
    versions = checkpoint.latest(folder / "checkpoints").state["versions"]
    change(folder, versions=versions | {"torch": "0.1", "source": "00000000"})
    output = run(tmp_path, f"resume={folder}", "rl.steps=6")
    assert (
        f"note:    other code than saved it (source 00000000 → {versions['source']}, torch 0.1 → {versions['torch']})"
        in output
    )
    assert "note:    changed since it was started: rl.steps: 5 → 6" in output
    change(folder, format=2)
    assert "has format 2, this version of hybrid_rl reads 1 only" in run(
        tmp_path, f"resume={folder}", "rl.steps=7", code=1
    )


def test_must(wholes, tmp_path):
    assert (
        run(tmp_path, "resume=must", code=2)
        == "hybrid_rl: resume=must: there is no run in outputs/reverse to go on with\n"
    )
    run(tmp_path, moment=Moment("evaluation", 0), code=-9)
    assert "there is no complete checkpoint in" in run(tmp_path, "resume=must", code=1)
    output = run(tmp_path, "resume=auto")
    assert f"note:    {folder_of(tmp_path).absolute()} was ended before its first checkpoint; it begins again" in output
    assert_same(wholes[1], tmp_path)
    assert "reached its end; resume=" in run(tmp_path, "resume=must", code=2)


def test_the_best_checkpoint_is_kept_and_named(wholes):
    folder = folder_of(wholes[1])
    best = json.loads((folder / "summary.json").read_text())["best"]
    evaluated = {
        line["step"]: line["reward"]
        for line in metrics(wholes[1])
        if line["stage"] == "eval" and line["name"] in ("step", "rl")
    }
    assert evaluated.keys() == {2, 4, 5}
    assert best["reward"] == max(evaluated.values()) == evaluated[best["step"]]
    assert best["checkpoint"] == f"checkpoints/rl_{best['step']:06d}"
    kept = {folder.name for folder in checkpoint.complete(folder / "checkpoints")}
    assert kept == {"rl_000005", f"rl_{best['step']:06d}"}
