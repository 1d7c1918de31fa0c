"""Ranks as a user starts them: by the command itself, torchrun or accelerate; and no rank that outlives the others.

What the ranks do once they are there is not a training run but a function of tests/rank_program.py.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from hybrid_rl.run import main
from tests import rank_program

pytestmark = pytest.mark.slow  # each starts several ranks, or whole runs

ROOT = Path(__file__).parents[2]
RUN = ["-m", "hybrid_rl.run", "+recipe=reverse", "device=cpu"]
OWN = [sys.executable, *RUN, "ranks=2"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr",
    "localhost",
    "--nproc-per-node",
    "2",
    *RUN,
]
ACCELERATE = [
    sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--use_fsdp", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", *RUN,
]  # fmt: skip
STAND_IN = f"""
import datetime, sys
sys.path.insert(0, {str(ROOT)!r})
import tests.rank_program
sys.modules["hybrid_rl.stages"] = tests.rank_program
datetime.datetime = tests.rank_program.Skewed
"""
SOON = 8.0  # seconds within which everything must be gone
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    """start(function of rank_program, command) → the process, in tmp_path, in a process group of its own; what is left of it is killed."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    plain = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "GLOO_SOCKET_IFNAME")}
    environment = plain | {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    started = []

    def start(does: str, command: list[str], **more: str) -> subprocess.Popen:
        if "ranks=2" not in command:  # the command's own ranks see to it themselves
            more["GLOO_SOCKET_IFNAME"] = "lo"
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment | {rank_program.DOES: does} | more, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    left = [p for process in started for p in tree(process.pid)] + [
        p for fact in facts(tmp_path) for p in tree(fact["pid"])
    ]
    for process in started:
        process.terminate()
    for process in psutil.wait_procs(left, timeout=5)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for process in started:
        process.wait(10)
        process.stdout.close()


def facts(folder: Path) -> list[dict]:
    """What each rank wrote about itself when it started to work, in rank order."""
    return sorted((json.loads(f.read_text()) for f in folder.glob("facts/*.json")), key=lambda fact: fact["rank"])


def tree(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def end(process: subprocess.Popen, code: int = 0, patience: float = 90) -> str:
    """What it printed until it ended by itself."""
    output, _ = process.communicate(timeout=patience)
    assert process.returncode == code, output
    return output


def at_work(process: subprocess.Popen, folder: Path, ranks: int = 2) -> list[psutil.Process]:
    """Wait until the ranks work; all processes that there are now."""
    for line in process.stdout:
        if line == "at work\n":
            break
    pids = [fact["pid"] for fact in facts(folder)]
    assert len(pids) == ranks
    processes = [p for pid in pids for p in tree(pid)]
    assert len(processes) >= ranks * 4  # each with a reward worker, multiprocessing's tracker and another program
    (folder / "seen").touch()
    return list({*processes, *tree(process.pid)})


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=SOON)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_the_command_starts_its_ranks(start, tmp_path):
    assert end(start("agrees", OWN)) == "2 ranks agree\n"  # and no word from torch's launcher
    one, two = facts(tmp_path)
    assert (one["rank"], two["rank"]) == (0, 1)
    assert one["folder"] == two["folder"]
    assert [one["folder"]] == [str(p) for p in tmp_path.glob("outputs/reverse/*")]


def test_one_rank_is_this_very_process(start, tmp_path):
    process = start("agrees", [sys.executable, *RUN])
    assert end(process) == "1 ranks agree\n"
    assert [(f["pid"], f["world"], f["group"]) for f in facts(tmp_path)] == [(process.pid, 1, False)]


@pytest.mark.parametrize("command", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_other_launchers(start, tmp_path, command):
    assert "2 ranks agree\n" in end(start("agrees", command))
    one, two = facts(tmp_path)
    assert one["folder"] == two["folder"]
    assert [one["folder"]] == [str(p) for p in tmp_path.glob("outputs/reverse/*")]


def test_several_nodes(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    nodes = [
        start("agrees", [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "test",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "localhost", *RUN,
        ])
        for _ in range(2)
    ]  # fmt: skip
    output = "".join(end(node) for node in nodes)
    assert output.count("2 ranks agree\n") == 1
    assert len({fact["folder"] for fact in facts(tmp_path)}) == 1


def test_a_sweep_starts_the_ranks_of_each_job(start, tmp_path):
    assert end(start("agrees", [*OWN, "-m", "seed=1,2"])).count("2 ranks agree\n") == 2
    assert sorted(Path(fact["folder"]).name for fact in facts(tmp_path)) == ["0", "0", "1", "1"]


def test_every_socket_is_on_the_loopback_interface(start, tmp_path):
    process = start("works", OWN)
    at_work(process, tmp_path)
    listening = [c.laddr.ip for p in tree(process.pid) for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= 3  # the launcher's store, and each rank's gloo
    assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1", "::1"}
    if sys.platform == "linux":  # also where the host's name is another address
        assert {psutil.Process(fact["pid"]).environ()["GLOO_SOCKET_IFNAME"] for fact in facts(tmp_path)} == {"lo"}


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("second_raises", "ValueError: this is not right"),
        ("main_raises_for_all", "IndexError: list index out of range"),
    ],
)
def test_the_rank_that_fails_speaks_alone(start, does, error):
    output = end(start(does, OWN), code=1)
    assert output.startswith(f"hybrid_rl: rank {int(does == 'second_raises')} failed\nTraceback")
    assert output.endswith(f"{error}\n")
    assert output.count("Traceback") == 1


def test_under_torchrun_the_rank_that_fails_speaks_first(start):
    output = end(start("second_raises", TORCHRUN), code=1)
    assert (
        output.index("hybrid_rl: rank 1 failed")
        < output.index("ValueError: this is not right")
        < output.index("ChildFailedError")
    )
    assert "rank 0 failed" not in output


def test_what_all_ranks_would_say_is_said_once(start):
    assert end(start("fails", OWN), code=1) == "no such model\n"


def test_a_killed_rank_ends_the_run(start, tmp_path):
    process = start("works", OWN)
    processes = at_work(process, tmp_path)
    os.kill(facts(tmp_path)[1]["pid"], signal.SIGKILL)
    assert end(process, code=1) == "hybrid_rl: rank 1 was ended by SIGKILL; did the machine run out of memory?\n"
    assert_gone(processes)


@pytest.mark.parametrize(
    ("does", "phase", "frame"),
    [("second_hangs", "rollout", "in hangs_forever"), ("second_hangs_before_any_phase", "start", "in hangs_forever")],
)
def test_a_rank_that_hangs_is_named_with_its_stack(start, tmp_path, does, phase, frame):
    begun = time.monotonic()  # before any progress, which comes before what at_work waits for
    process = start(does, [*OWN, "rank_timeout=5"])
    processes = at_work(process, tmp_path)
    since = time.monotonic()
    output = end(process, code=1)
    assert time.monotonic() - begun >= 5
    assert time.monotonic() - since < 15
    lines = output.splitlines()
    assert re.fullmatch(
        rf"hybrid_rl: rank 1 hangs in phase {phase}: no progress since \d\d:\d\d:\d\d \(\d+ s\), rank_timeout=5",
        lines[0],
    )
    own = lines.index(f"  rank 1, phase {phase}, hangs:")
    assert lines[own + 1].endswith(frame)
    assert any(line.startswith("  rank 0") and line.endswith("waits for the others:") for line in lines)
    (run,) = tmp_path.glob("outputs/reverse/*")
    assert frame in (run / "stacks" / "rank_1.txt").read_text()
    assert "all_gather" in (run / "stacks" / "rank_0.txt").read_text()
    assert "Traceback" not in output
    assert_gone(processes)


@pytest.mark.parametrize(
    ("does", "said", "doing"),
    [
        ("first_hangs_after_the_second_has_ended", "rank 0 hangs in phase after rollout", "phase after rollout, hangs"),
        (
            "first_waits_for_the_second_that_has_ended",
            "rank 0 waits for rank 1 (ended)",
            "phase update, waits for the others",
        ),
    ],
)
def test_a_rank_that_hangs_is_seen_after_another_has_ended(start, tmp_path, does, said, doing):
    process = start(does, [*OWN, "rank_timeout=5"])
    processes = at_work(process, tmp_path)
    lines = end(process, code=1).splitlines()
    assert re.fullmatch(
        rf"hybrid_rl: {re.escape(said)}: no progress since \d\d:\d\d:\d\d \(\d+ s\), rank_timeout=5", lines[0]
    )
    assert f"  rank 0, {doing}:" in lines
    assert not any("rank 1, " in line for line in lines)
    assert_gone(processes)


def test_a_rank_that_gets_on_slowly_is_waited_for(start):
    """Longer than rank_timeout in one phase, with progress; the other rank waits all the time."""
    assert end(start("second_is_slow", [*OWN, "rank_timeout=2"])) == "2 ranks agree\n"


def test_a_stopped_rank_is_named(start, tmp_path):
    process = start("works", [*OWN, "rank_timeout=5"])
    processes = at_work(process, tmp_path)
    os.kill(facts(tmp_path)[1]["pid"], signal.SIGSTOP)
    output = end(process, code=1)
    assert output.startswith("hybrid_rl: rank 1 hangs in phase rollout")
    assert "no answer: the process is stopped" in output
    assert_gone(processes)


def test_ranks_that_wait_for_each_other(start):
    output = end(start("each_waits", [*OWN, "rank_timeout=5"]), code=1)
    assert output.startswith("hybrid_rl: all ranks wait for each other: no progress since ")


def test_one_rank_that_hangs_says_so_itself(start, tmp_path):
    process = start("one_hangs", [sys.executable, *RUN, "rank_timeout=2"])
    processes = at_work(process, tmp_path, ranks=1)
    output = end(process, code=1)
    assert output.startswith("hybrid_rl: rank 0 hangs in phase rollout")
    assert "in hangs_forever" in output
    assert_gone(processes)


def test_under_another_launcher_collectives_give_up(start):
    output = end(
        start("second_hangs", [*TORCHRUN, "rank_timeout=6", "stop_timeout=5"]), code=1, patience=180
    )  # torchrun waits for the other one
    assert "hybrid_rl: rank 0 failed\nTraceback" in output
    assert "imed out" in output


@pytest.mark.parametrize("command", [OWN, TORCHRUN], ids=["own", "torchrun"])
def test_no_rank_outlives_its_launcher(start, tmp_path, command):
    process = start("works", command)
    processes = at_work(process, tmp_path)
    process.kill()
    assert_gone(processes)


HEARD = "hybrid_rl: {}: the run stops after this step and saves it, within {} s; a second signal ends it at once\n"


@pytest.mark.parametrize(
    ("command", "send", "code"),
    [
        (OWN, lambda pid: os.killpg(pid, signal.SIGINT), 130),  # as a terminal does
        (OWN, lambda pid: os.kill(pid, signal.SIGTERM), 143),
        pytest.param(TORCHRUN, lambda pid: os.killpg(pid, signal.SIGINT), 1, marks=pytest.mark.slow),
        pytest.param(TORCHRUN, lambda pid: os.kill(pid, signal.SIGTERM), 1, marks=pytest.mark.slow),
    ],
    ids=["ctrl-c", "SIGTERM", "torchrun ctrl-c", "torchrun SIGTERM"],
)
def test_at_a_signal_every_rank_ends_where_all_agree(start, tmp_path, command, send, code):
    process = start("works", command)
    processes = at_work(process, tmp_path)
    send(process.pid)
    output = end(process, code=code)
    name = "SIGINT" if "SIGINT" in output else "SIGTERM"
    if command is OWN:
        assert output == HEARD.format(name, 600) + "saved\n"
    else:  # torchrun speaks too, before, between and after
        assert HEARD.format(name, 600) in output
        assert "saved\n" in output
    assert_gone(processes)


def test_a_signal_to_one_rank_ends_all(start, tmp_path):
    process = start("works", OWN)
    processes = at_work(process, tmp_path)
    os.kill(facts(tmp_path)[1]["pid"], signal.SIGTERM)
    assert end(process, code=143) == "saved\n"
    assert_gone(processes)


@pytest.mark.parametrize("patience", [600, 1])
def test_ranks_that_do_not_stop_are_ended(start, tmp_path, patience):
    """By a second signal, or by stop_timeout."""
    process = start("does_not_stop", [*OWN, f"stop_timeout={patience}"])
    processes = at_work(process, tmp_path)
    since = time.monotonic()
    process.terminate()
    if patience > 1:
        time.sleep(0.1)
        process.terminate()  # the same wish, delivered twice
        time.sleep(1.2)
        assert process.poll() is None
        process.terminate()
    assert HEARD.format("SIGTERM", patience) in end(process, code=143)
    assert time.monotonic() - since < SOON + 4
    assert_gone(processes)


def test_a_signal_ends_a_sweep_with_its_job(start, tmp_path):
    process = start("works", [sys.executable, *RUN, "-m", "seed=1,2"])
    processes = at_work(process, tmp_path, ranks=1)
    os.killpg(process.pid, signal.SIGINT)
    output, _, rest = end(process, code=130).partition("\nsweep:   0 of 2 jobs reached their end, not 0, 1\n")
    assert output == HEARD.format("SIGINT", 600) + "saved\n"
    assert rest.startswith("compare: "), "the folder is named"
    assert_gone(processes)
    assert len(facts(tmp_path)) == 1


def test_bad_settings_are_said_once(start, tmp_path):
    assert end(start("agrees", [*OWN, "rl.steps=-1"]), code=2).splitlines() == [
        "hybrid_rl: rl.steps=-1 (command line): must be at least 0"
    ]
    assert end(start("agrees", [*TORCHRUN, "rl.steps=-1"]), code=1).count("hybrid_rl: ") == 1  # torchrun's exit code
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "world", "expected"),
    [
        (["ranks=3"], "2", "ranks=3: the launcher started 2; leave ranks out"),
        (["ranks=2"], "1", "ranks=2: the launcher started 1; leave ranks out"),
        (["-m", "seed=0,1"], "2", "-m: a sweep starts the ranks of its jobs itself"),
        (["ranks=-1"], None, "ranks=-1 (command line): must be at least 0"),
        (["rank_timeout=0"], None, "rank_timeout=0.0 (command line): must be a number above 0"),
        pytest.param(
            ["ranks=2", "device=cuda"], None, "ranks=2: torch sees 0 GPU(s) and each rank needs one",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs"),
        ),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit(start, tmp_path, arguments, world, expected):
    place = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    launcher = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, **place} if world else {}
    output = end(start("agrees", [sys.executable, *RUN, *arguments], **launcher), code=2)
    assert output.startswith(f"hybrid_rl: {expected}")
    assert output.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("overrides", "gpus", "ranks"),
    [
        ([], 0, 1),
        ([], 2, 2),
        (["ranks=1"], 2, 1),
        (["ranks=4", "device=cpu"], 2, 4),
        (["ranks=3"], 2, None),
        (["ranks=3"], 0, 3),
    ],
)
def test_one_rank_for_each_gpu(monkeypatch, tmp_path, overrides, gpus, ranks):
    """None: refused. On the CPU as many as wanted."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run", "+recipe=reverse", *overrides])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("hybrid_rl.stages.run", lambda config, folder, here, command: here.world)
    monkeypatch.setattr("hybrid_rl.run.launch", lambda count, *more: count)
    monkeypatch.setattr("hybrid_rl.processes.hangs.alone", lambda *how: None)
    GlobalHydra.instance().clear()
    OmegaConf.clear_resolver("run_folder")
    assert main() == (2 if ranks is None else ranks)
    assert (tmp_path / "outputs").exists() == (ranks is not None)
