"""The sandbox under real attack: nothing is mocked. An attack prints the right answer, and so earns a reward, only where it has succeeded."""

import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.sandbox import run as sandbox
from hybrid_rl.sandbox.code import passes_tests, same_text
from hybrid_rl.sandbox.run import Limits, SandboxError, run
from hybrid_rl.types import Rollout, Task
from tests.refused import CALLS
from tests.sandbox.attacks import ATTACKS, BEGIN, HOARDERS, MUST_FIND

pytestmark = pytest.mark.slow

MISSING = sandbox.check()
needs_sandbox = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
ROOM = Limits(
    cpu_seconds=10, wall_seconds=30, total_seconds=60
)  # for programs that should end by themselves, on a busy machine
REPOSITORY = Path(__file__).parents[2]


def task(answer: object) -> Task:
    return Task("t", ({"role": "user", "content": "x"},), answer if isinstance(answer, str) else json.dumps(answer))


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


def sandboxed(mark: str) -> list[str]:
    """Command lines of processes that a sandbox of this test left behind."""
    names = (mark, f"hybrid_rl-sandbox-of-{os.getpid()}")
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(name in line for name in names)]


class World:
    """What an attack would like to reach: a process, a file, a secret in the environment, a listening port."""

    def __init__(self, folder: Path):
        self.mark = f"mark-{secrets.token_hex(8)}"
        self.answer = f"expected-{secrets.token_hex(16)}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], env={"CANARY": self.answer}
        )
        self.file = folder / "canary"
        self.file.write_text(self.answer)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)

    def names(self) -> str:
        port = self.server.getsockname()[1]
        return f"PID, FILE, PORT, MARK = {self.process.pid}, {str(self.file)!r}, {port}, {self.mark!r}\n"

    def assert_unharmed(self) -> None:
        assert self.process.poll() is None
        assert self.file.read_text() == self.answer
        assert [p.name for p in self.file.parent.iterdir()] == ["canary"]
        with pytest.raises(BlockingIOError):
            self.server.accept()
        assert sandboxed(self.mark) == []

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.server.close()


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path)
    monkeypatch.setenv("CANARY", world.answer)
    yield world
    world.close()


@needs_sandbox
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_nothing_and_harms_nothing(name, world):
    told = "" if name in MUST_FIND else f"ANSWER = {world.answer!r}\n"
    code = world.names() + told + BEGIN + ATTACKS[name]
    start = time.monotonic()
    reward = passes_tests(
        block(code),
        task({"tests": [{"stdin": "1\n", "stdout": world.answer}]}),
        time_limit=3.0 if name in MUST_FIND else 0.5,
    )
    assert reward == {"format": 0.0, "tests": 0.0}
    assert time.monotonic() - start < 20  # 1 s (6 s), and what a busy machine adds
    world.assert_unharmed()


@needs_sandbox
def test_the_attacks_prelude_itself_would_earn_the_reward(world):
    """So that no attack fails only because it cannot speak; and what is found by searching would be printed."""
    code = f"{world.names()}ANSWER = {world.answer!r}\n{BEGIN}TRY(print, 'x', file=sys.stderr) and WON()"
    assert passes_tests(block(code), task({"tests": [{"stdin": "", "stdout": world.answer}]}), 10.0)["tests"] == 1.0
    code = f"{world.names()}kept = 'expected-' + input()\n{BEGIN}{ATTACKS['find_the_tests']}"
    outcome = run(code, [world.answer.removeprefix("expected-")], ROOM)[0]
    assert world.answer in outcome.stdout, outcome


# A function's result: only plain JSON values of the right type come out equal. The expected result is 4.
RESULTS = {
    "right": ("return 4", True),
    "right_by_printing_too": ("print('x' * 1000); return 2 + 2", True),
    "always_equal": ("return type('T', (), {'__eq__': lambda *a: True, '__hash__': lambda s: 0})()", False),
    "always_equal_int": ("return type('T', (int,), {'__eq__': lambda *a: True, '__repr__': lambda s: '5'})(5)", False),
    "always_equal_str": ("return type('T', (str,), {'__eq__': lambda *a: True})('5')", False),
    "text": ("return '4'", False),
    "float": ("return 4.0", False),
    "nan": ("return float('nan')", False),
    "infinity": ("return float('inf')", False),
    "nothing": ("pass", False),
    "list": ("return [4]", False),
    "nested": ("x = []\n for _ in range(10**5): x = [x]\n return x", False),
    "nested_text": ("import os; os.write(3, b'[' * 60000); os._exit(0)", False),
    "cycle": ("x = []; x.append(x); return x", False),
    "digits": ("return 7 ** 100000", False),
    "digits_text": ("import os; os.write(3, b'4' * 60000); os._exit(0)", False),
    "large": ("return [0] * 10**6", False),
    "not_text": ("import os; os.write(3, b'\\xff\\xfe4'); os._exit(0)", False),
    "two_results": ("import os; os.write(3, b'4 5'); os._exit(0)", False),
    "generator": ("yield 4", False),
    "raise": ("raise ValueError(4)", False),
    "right_but_failing_afterwards": ("import atexit, os; atexit.register(os._exit, 3); return 4", False),
}


@needs_sandbox
@pytest.mark.parametrize("name", RESULTS)
def test_what_a_function_returns_is_data(name):
    body, right = RESULTS[name]
    answer = {"function": "f", "tests": [{"args": [2], "result": 4}]}
    assert passes_tests(block(f"def f(n):\n {body}"), task(answer), 10.0)["tests"] == float(right)


HONEST = {
    "sum": ("print(sum(map(int, input().split())))", "1 2 3", "6"),
    "all_of_stdin": ("import sys; print(len(sys.stdin.read()), end='')", "a\nb\n", "4"),
    "bytes": ("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])", "abc", "cba"),
    "open_0": ("print(open(0).read().strip())", "7\n", "7"),
    "end_of_input": ("n = 0\ntry:\n    while True: n += int(input())\nexcept EOFError: print(n)", "1\n2\n", "3"),
    "main_guard": ("def main(): print(1)\nif __name__ == '__main__': main()", "", "1"),
    "exit": ("print(1); exit(0)", "", "1"),
    "at_exit": ("import atexit; atexit.register(print, 1)", "", "1"),
    "text": ("print(input() + 'é€')", "ß", "ßé€"),
    "deep_recursion": (
        "import sys; sys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(30000))", "", "30000"
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor as P\nwith P(4) as p: print(sum(p.map(lambda x: x * x, range(5))))", "", "30"
    ),
    "processes": ("import multiprocessing as m\nf = abs\nif __name__ == '__main__':\n    with m.Pool(2) as p: print(p.map(f, [-1, 2]))", "", "[1, 2]"),
    "asyncio": ("import asyncio\nasync def f(): await asyncio.sleep(0); return 5\nprint(asyncio.run(f()))", "", "5"),
    "files": (
        "import os, tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n    f.write('5'); f.seek(0); print(f.read())"
        "\nprint(os.getcwd(), os.path.expanduser('~'))", "", "5\n/tmp /tmp",
    ),
    "dataclass_pickle": (
        "import pickle, dataclasses as d\n@d.dataclass\nclass A: x: int\nprint(pickle.loads(pickle.dumps(A(3))))", "", "A(x=3)"
    ),
    "library": (
        "import heapq, bisect, itertools, functools, decimal, fractions, random, string, re, datetime, json, hashlib, zlib, struct"
        "\nprint(decimal.Decimal('0.1') + 1)", "", "1.1",
    ),
    "child": ("import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(6)'], capture_output=True, text=True).stdout)", "", "6"),
    "memory": ("x = bytearray(200 << 20); print(len(x) >> 20)", "", "200"),
    "many_threads": (
        "import threading as t, time\nb = t.Barrier(15)\na = [t.Thread(target=lambda: (b.wait(), bytearray(9999))) for _ in range(15)]"
        "\nfor x in a: x.start()\nfor x in a: x.join()\nprint(len(a))", "", "15",
    ),
    "many_threads_of_a_child": (
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'import threading as t\\nb = t.Barrier(12)\\n"
        "a = [t.Thread(target=b.wait) for _ in range(12)]\\nfor x in a: x.start()\\nfor x in a: x.join()\\nprint(6)'],"
        " capture_output=True, text=True).stdout)", "", "6",
    ),
    "event_loop_with_threads": (
        "import asyncio\nasync def f(): return sum(await asyncio.gather(*[asyncio.to_thread(abs, -n) for n in range(8)]))"
        "\nprint(asyncio.run(f()))", "", "28",
    ),
    "recursion_through_c": (
        "import functools, sys; sys.setrecursionlimit(10**6)\n@functools.lru_cache(None)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)"
        "\nprint(f(20000))", "", "20000",
    ),
    "database": (
        "import sqlite3\nc = sqlite3.connect('x.db')\nwith c: c.execute('create table t(a)'); c.execute('insert into t values(7)')"
        "\nprint(c.execute('select a from t').fetchone()[0])", "", "7",
    ),
}  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(name):
    code, stdin, stdout = HONEST[name]
    (outcome,) = run(code, [stdin], ROOM)
    assert outcome.ok, outcome
    assert same_text(outcome.stdout, stdout)


@needs_sandbox
def test_each_input_gets_a_process_a_folder_and_an_outcome_of_its_own():
    code = "import os\nprint(os.path.exists('x'), input())\nopen('x', 'w').close()\nif not os.fork():\n    import time; time.sleep(60)"
    outcomes = run(code, ["a", "b", "c"], ROOM)
    assert [o.stdout for o in outcomes] == ["False a\n", "False b\n", "False c\n"]
    assert run(code, [], ROOM) == []


@needs_sandbox
def test_a_program_does_not_see_the_inputs_of_other_tests():
    code = (
        "import gc, re, sys\nown, found, frame = input(), set(), sys._getframe()\nlook = re.compile('input-[0-9]+-[0-9a-f]{8}').findall\n"
        "for o in gc.get_objects():\n    if isinstance(o, (str, bytes, dict, list, tuple)): found |= set(look(repr(o)))\n"
        "while frame: found |= set(look(repr(frame.f_locals))); frame = frame.f_back\nprint(found == {own}, len(found))"
    )
    outcomes = run(code, [f"input-{i}-{secrets.token_hex(4)}" for i in range(3)], ROOM)
    assert [o.stdout for o in outcomes] == ["True 1\n"] * 3, outcomes


@needs_sandbox
def test_locks_and_flushes_of_a_program_do_not_reach_the_machines_files():
    """Where they did, the locks that this process holds would refuse it, and a pipe cannot be flushed."""
    code = (
        "import fcntl, mmap, os\nwith open(os.__file__, 'rb') as file:\n    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)\n    mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ).flush()\n"
        "os.fsync(1); os.fdatasync(1); print('idle')"
    )
    with open(os.__file__, "r+b" if os.access(os.__file__, os.W_OK) else "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if file.writable():
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (outcome,) = run(code, [""], ROOM)
    assert outcome.stdout == "idle\n", outcome


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "limits", "end"),
    [
        *(
            (
                BEGIN + "ANSWER = 1\n" + ATTACKS[name],
                Limits(cpu_seconds=10, wall_seconds=30, total_seconds=30),
                "memory",
            )
            for name in HOARDERS
        ),
        ("import time; time.sleep(60)", Limits(wall_seconds=0.3), "wall"),
        ("while True: pass", Limits(cpu_seconds=0.2, wall_seconds=30, total_seconds=30), "cpu"),
        (
            "import os\nfor _ in range(3): os.fork()\nwhile True: pass",
            Limits(cpu_seconds=0.5, wall_seconds=30, total_seconds=30),
            "cpu",
        ),
        (
            "import os, signal, time\ntry: signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nexcept OSError: pass\n"
            "for _ in range(60):\n    if not os.fork():\n        end = time.process_time() + 0.03\n        while time.process_time() < end: pass\n"
            "        os._exit(0)\n    try: os.wait()\n    except ChildProcessError: pass",
            Limits(cpu_seconds=0.5, wall_seconds=30, total_seconds=30),
            "cpu",
        ),
        (
            "import os, time\nfor _ in range(3): os.fork()\nx = b'x' * (40 << 20)\ntime.sleep(60)",
            Limits(memory_mib=64, wall_seconds=30, total_seconds=30),
            "memory",
        ),
        ("while True: print('x' * 99)", Limits(cpu_seconds=10, wall_seconds=30, total_seconds=30), "output"),
        ("print('x' * 2000)", Limits(output_bytes=1000), "output"),
        ("import os; os.kill(os.getpid(), 11)", ROOM, "exit"),
    ],
)
def test_an_outcome_says_which_limit_was_broken(code, limits, end):
    (outcome,) = run(code, [""], limits)
    assert (outcome.end, outcome.ok) == (end, False)
    if end == "exit":
        assert outcome.code == -signal.SIGSEGV
    assert len(outcome.stdout) <= limits.output_bytes


@needs_sandbox
def test_an_exit_code_and_the_error_come_back():
    failed, left = run("import sys\nif input() == '1': sys.exit(3)\n1/0", ["0", "1"], ROOM)
    assert (failed.end, failed.code) == ("exit", 1)
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert (left.end, left.code, left.stderr) == ("exit", 3, "")


@needs_sandbox
def test_inputs_for_which_no_time_is_left_are_not_run():
    outcomes = run("import time; time.sleep(60)", [""] * 50, Limits(wall_seconds=0.5, total_seconds=1.2))
    ends = [o.end for o in outcomes]
    assert len(ends) == 50
    assert ends[0] == "wall"
    assert ends[-1] == "not run"


@needs_sandbox
def test_the_order_of_a_set_is_the_same_every_time():
    outcomes = [run("print({str(i) for i in range(99)})", [""], ROOM)[0] for _ in range(2)]
    assert outcomes[0].ok
    assert outcomes[0] == outcomes[1]


@needs_sandbox
def test_everything_ends_with_the_process_that_asked():
    mark = f"mark-{secrets.token_hex(8)}"
    code = f"import os, sys\nos.fork()\nos.setsid()\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}])"
    script = f"from hybrid_rl.sandbox.run import *\nrun({code!r}, [''], Limits(wall_seconds=300, total_seconds=300))"
    process = subprocess.Popen([sys.executable, "-c", script, mark], cwd=REPOSITORY)
    try:
        wait_until(lambda: len(sandboxed(mark)) == 3)  # the asking process, and two of the program
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not sandboxed(mark) and not sandboxed(f"hybrid_rl-sandbox-of-{process.pid}"))


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_sandbox
def test_reward_workers_score_code_and_survive_it():
    completions = [
        block("print(int(input()) * 2)"),
        block("import os; os.kill(os.getppid(), 9); os.kill(-1, 9)"),
        "no code",
        block("print(2)"),
    ]
    answer = {"tests": [{"stdin": str(n), "stdout": str(2 * n)} for n in (1, 2)]}
    scorer = Scorer(
        {"_target_": "hybrid_rl.sandbox.code.passes_tests", "time_limit": 5.0, "total_seconds": 20.0}, 2, timeout=60.0
    )
    try:
        scorer.check()
        rollouts = []
        for i, completion in enumerate(completions):
            r = Rollout("t", 0, i, 0, [1])
            r.finish("stop", completion)
            rollouts.append(r)
            scorer.submit(r, task(answer))
        assert scorer.finish() == 0
    finally:
        scorer.close()
    assert [r.reward_parts["tests"] for r in rollouts] == [1.0, 0.0, 0.0, 0.5]


def ordinary_python() -> str | None:
    """A Python that a user without rights can start, to try the other way into a sandbox when the tests run as root."""
    probe = "import sys; sys.path.insert(0, sys.argv[1]); import hybrid_rl.sandbox.run"
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            if (
                subprocess.run(
                    [python, "-c", probe, str(REPOSITORY)],
                    user=65533,
                    group=65533,
                    extra_groups=[],
                    capture_output=True,
                ).returncode
                == 0
            ):
                return python
        except OSError:
            pass
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="all of these tests already run as an ordinary user")
def test_an_ordinary_user_has_the_sandbox_or_is_told_what_is_missing():
    python = ordinary_python()
    if python is None:
        pytest.skip("no Python here that an ordinary user can start")
    attack = (
        "import os\nfor f in (lambda: os.kill(-1, 9), lambda: os.setuid(0), lambda: open('/x', 'w')):\n    try: f()\n    except OSError: pass\n"
        "n = 0\nfor _ in range(200):\n    try:\n        if not os.fork(): import time; time.sleep(60)\n        n += 1\n    except OSError: pass\n"
        "print(n < 20, os.listdir('/tmp'), os.listdir('/proc') == [], __import__('ctypes').CDLL(None).prctl(39, 0, 0, 0, 0) == 1)"
    )
    script = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\nfrom hybrid_rl.sandbox.run import *\n"
        f"missing = check()\nprint(missing or run({attack!r}, [''], Limits(10, 30, 60))[0].stdout)"
    )
    done = subprocess.run(
        [python, "-c", script], user=65533, group=65533, extra_groups=[], capture_output=True, text=True, cwd="/"
    )
    assert "True [] True True" in done.stdout or "user namespaces" in done.stdout or "container" in done.stdout, done


@needs_sandbox
def test_without_namespaces_it_refuses_and_names_the_setting():
    script = (
        "import ctypes, os, sys\nlibc = ctypes.CDLL(None)\nuid = os.geteuid()\nassert libc.unshare(1 << 28) == 0\n"
        "open('/proc/self/uid_map', 'w').write(f'0 {uid} 1')\nopen('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "from hybrid_rl.sandbox.run import check\nprint(check())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode:
        pytest.skip("user namespaces are not to be had here")
    assert done.stdout.startswith("no sandbox for code: ")
    assert done.stdout.endswith("sysctl user.max_user_namespaces=10000.\n")


@needs_sandbox
@pytest.mark.parametrize("call", sorted(set(CALLS) - {"clone"}))
def test_a_refused_system_call_ends_in_one_line(call):
    """And no program is run with less: where limits could not be set, all of them would seem to fail."""
    if call == "setresuid" and os.geteuid():
        pytest.skip("only root changes its user")
    script = "from hybrid_rl.sandbox.run import check\nprint(check())"
    command = [sys.executable, str(REPOSITORY / "tests/refused.py"), call, sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout.startswith("no sandbox for code: "), done
    assert "Operation not permitted" in done.stdout
    assert "--cap-add SYS_ADMIN" in done.stdout
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "the sandbox needs Linux" in str(sandbox.check())
    with pytest.raises(SandboxError, match="not darwin"):
        run("print(1)", [""], Limits())


@pytest.mark.parametrize(
    "change", [{"cpu_seconds": 0}, {"wall_seconds": float("inf")}, {"memory_mib": -1}, {"total_seconds": float("nan")}]
)
def test_limits_must_be_positive_and_finite(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Limits(**change)


@pytest.mark.parametrize("dry", ["true", "false"])
def test_a_run_without_a_sandbox_ends_before_its_model_loads(dry, tmp_path):
    """As in a container that denies unshare and mount; the line says what to do, and nothing is trained."""
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    row = {"prompt": "Print 1.", "answer": json.dumps({"tests": [{"stdin": "", "stdout": "1"}]})}
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({**row, "prompt": f"{name} {i}"}) + "\n" for i in range(2))
        )
    (tmp_path / "conf" / "recipe" / "programs.yaml").write_text(
        "# @package _global_\nname: programs\ndata: {_target_: hybrid_rl.data.files.load_tasks, rl: train.jsonl, eval: test.jsonl}\n"
        "reward: {_target_: hybrid_rl.sandbox.code.passes_tests}\n"
    )
    settings = [
        "+recipe=programs",
        "rollout.batch_size=4",
        "rollout.group_size=2",
        "sft.steps=0",
        "rl.steps=1",
        "algo.minibatches=1",
        "device=cpu",
        f"dry_run={dry}",
    ]
    command = [
        sys.executable,
        str(REPOSITORY / "tests/refused.py"),
        "unshare,mount",
        sys.executable,
        "-m",
        "hybrid_rl.run",
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--config-dir", str(tmp_path / "conf"), *settings],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done
    assert done.stdout.splitlines()[-1].startswith(
        "hybrid_rl: no sandbox for code: [Errno 1] unshare: Operation not permitted. "
    )
    assert "--cap-add SYS_ADMIN" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert not list(tmp_path.glob("outputs/*/*/rollouts"))
