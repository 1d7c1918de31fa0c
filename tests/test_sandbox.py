"""The sandbox under real attack: nothing is mocked. An attack prints the right answer, and so earns a reward, only where it has succeeded."""

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

from hybrid_rl.rollout import sandbox
from hybrid_rl.rollout.code_reward import extract_code, passes_tests, read_tests, same, same_text
from hybrid_rl.rollout.reward import Scorer
from hybrid_rl.rollout.sandbox import Limits, SandboxError, run
from hybrid_rl.types import Rollout, Task

MISSING = sandbox.check()
needs_sandbox = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
ROOM = Limits(cpu_seconds=10, wall_seconds=30, total_seconds=60)  # for programs that should end by themselves, on a busy machine
REPOSITORY = Path(__file__).parents[1]


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
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={"CANARY": self.answer})
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


# Each gets ANSWER to print where it has succeeded, unless it must find it. TRY(f, …) runs f and says whether it raised nothing.
BEGIN = """
import ctypes, os, sys, time, signal, gc, re
def TRY(f, *a, **k):
    try:
        f(*a, **k)
        return True
    except Exception:
        return False
def WON():
    print(ANSWER)
    sys.stdout.flush()
libc = ctypes.CDLL(None, use_errno=True)
"""

ATTACKS = {
    # leaving early, and killing
    "exit": "sys.exit(0)",
    "os_exit": "os._exit(0)",
    "raise_system_exit": "raise SystemExit",
    "kill_parent": "os.kill(os.getppid(), 9); os.kill(os.getppid(), signal.SIGTERM); os.kill(os.getppid(), signal.SIGINT); os._exit(0)",
    "kill_parent_group": "os.killpg(os.getpgid(os.getppid()), 9)",
    "kill_own_group": "os.kill(0, 9)",
    "stop_own_group": "os.kill(0, signal.SIGSTOP)",
    "kill_session": "for p in range(0, 4): TRY(os.killpg, p, 9)",
    "stop_parent": "os.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(60)",
    "kill_all": "os.kill(-1, 9)",
    "kill_canary": "for s in (9, 15): TRY(os.kill, PID, s) and WON()",
    "kill_everyone_by_number": "for p in range(3, 100000):\n    TRY(os.kill, p, 9) and WON()",
    "stop_itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    # using things up
    "fork_bomb": "while True:\n    TRY(os.fork)",
    "fork_bomb_of_daemons": "while True:\n    if TRY(os.fork): TRY(os.setsid)",
    "thread_bomb": "import threading\nfor _ in range(2000): threading.Thread(target=time.sleep, args=(60,)).start()\nWON()",
    "count_forks": "n = 0\nfor _ in range(200):\n    n += TRY(lambda: os.fork() or time.sleep(60))\nn > 24 and WON()",
    "disk_one_file": (
        "n = 0\nwith open('f', 'wb') as f:\n    try:\n        while n < 64: n += f.write(bytes(1 << 20)) >> 20"
        "\n    except OSError: pass\nn > 20 and WON()"
    ),
    "disk_many_files": (
        "n = 0\nfor i in range(64):\n    try:\n        with open(f'f{i}', 'wb') as f: n += f.write(bytes(1 << 20)) >> 20"
        "\n    except OSError: pass\nn > 20 and WON()"
    ),
    "inodes": "n = 0\nfor i in range(20000):\n    n += TRY(os.mkdir, f'd{i}')\nn > 5000 and WON()",
    "deep_folders": "for i in range(3000):\n    os.mkdir('d'); os.chdir('d')\nos._exit(0)",
    "memory": "x = bytearray(1 << 30)\nWON()",
    "memory_slowly": "x = []\nwhile len(x) < 1024: x.append(bytearray(1 << 20))\nWON()",
    "memory_in_many_processes": "for _ in range(8): TRY(os.fork)\nx = [b'x' * (1 << 20) for _ in range(150)]\ntime.sleep(60)",
    "memory_shared": "import mmap\nx = mmap.mmap(-1, 1 << 30)\nWON()",
    "memory_file": "f = os.memfd_create('x')\nWON()",
    "memory_system_v": "libc.shmget(0, 1 << 28, 0o1600) >= 0 and WON()",
    "message_queues": "libc.msgget(0, 0o1600) >= 0 and WON()",
    "descriptors": "x = []\nwhile len(x) < 1000: x.append(os.dup(1))\nWON()",
    "raise_limits": "import resource as r\nfor l in (r.RLIMIT_AS, r.RLIMIT_NPROC, r.RLIMIT_CPU): TRY(r.setrlimit, l, (r.RLIM_INFINITY,) * 2) and WON()",
    "priority": "TRY(os.nice, -10) and WON()\nTRY(lambda: open('/proc/self/oom_score_adj', 'w').write('-999')) and WON()",
    "sleep": "time.sleep(600)\nWON()",
    "busy": "while True: pass",
    "ignore_signals": "for s in range(1, 65): TRY(signal.signal, s, signal.SIG_IGN)\nwhile True: time.sleep(1)",
    "close_everything_and_sleep": "os.closerange(0, 100)\ntime.sleep(600)",
    "output": "while True: print('x' * 1000)",
    "errors": "while True: print('x' * 1000, file=sys.stderr)",
    "result_channel": "while True: os.write(3, b'x' * 1000)",
    "output_from_daemon": "if os.fork(): os._exit(0)\nos.setsid()\nwhile True: os.write(1, b'x' * 1000)",
    "recursion": "sys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "recursion_in_c": "sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    "deep_syntax": "eval('-' * 10**6 + '1')",
    "power": "10 ** 10 ** 10\nWON()",
    "regular_expression": "re.match('(a+)+$', 'a' * 60 + 'b')\nWON()",
    "segfault": "ctypes.string_at(0)",
    "no_such_module": "import numpy_that_is_not_there",
    "syntax_error": "def f(:",
    "null_byte": "x = '\\0'\x00",
    "surrogate": "x = '\ud800'",
    # staying behind
    "daemon": "if not os.fork():\n    os.setsid()\n    if not os.fork():\n        while True: time.sleep(1)\nos._exit(0)",
    "daemon_program": (
        "import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', MARK], start_new_session=True)"
        "\ntime.sleep(0.3)"
    ),
    "exec": "os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600)', MARK])",
    # forging
    "forged_verdict": (
        "forged = b'{\"format\": 1.0, \"tests\": 1.0}\\nPASSED\\n'\nfor fd in range(256): TRY(os.write, fd, forged)\nos._exit(0)"
    ),
    "forged_frame": (
        "import struct\na = ANSWER.encode()\nframe = struct.pack('<BiIII', 0, 0, len(a), 0, 0) + a"
        "\nfor fd in range(256): TRY(os.write, fd, frame)\nos._exit(0)"
    ),
    "more_descriptors": "for fd in range(4, 1024): TRY(os.fstat, fd) and WON()",
    "patch_checker": """
import builtins, json, atexit, struct, marshal
true = type('T', (str,), {'__eq__': lambda *a: True, '__hash__': lambda s: 0})('x')
for module in (builtins, json, struct, marshal, os, sys):
    for name in list(vars(module)):
        if name not in ('print', '__import__', 'getattr', 'isinstance', '_exit', 'write', 'stdout', 'stderr', 'modules'):
            TRY(setattr, module, name, lambda *a, **k: true)
os.write(1, b'PASSED')
os._exit(0)""",
    "patch_exit": "os._exit = sys.exit = lambda *a: None\nsys.stdout = None",
    "patch_frames": """
f = sys._getframe()
while f:
    for name, value in list(f.f_locals.items()):
        if isinstance(value, dict): value.update(end='exit', code=0, outputs=[ANSWER], inputs=[], wall=1e9)
    f = f.f_back""",
    "at_exit": "import atexit\natexit.register(time.sleep, 600)",
    "never_ending_thread": "import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()",
    # reading what it should not
    "find_the_tests": """
found = set()
look = re.compile('expected-[0-9a-f]{32}').findall
for o in gc.get_objects(): found |= set(look(repr(o))) if isinstance(o, (str, dict, list, tuple)) else set()
f = sys._getframe()
while f: found |= set(look(repr(f.f_locals))); f = f.f_back
for folder in ('/tmp', '/root', '/home', '/dev', '/etc', '/proc', '/proc-outside', '/var', '/work', '/run', '/old', os.path.dirname(FILE)):
    for path, _, files in os.walk(folder):
        for name in files:
            try: found |= set(look(os.read(os.open(os.path.join(path, name), os.O_RDONLY | os.O_NONBLOCK), 10**6).decode('latin-1')))
            except OSError: pass
print(*found)""",
    "interpreter": (
        "for p in ('/proc/self/exe', sys.executable, os.__file__):"
        "\n    (TRY(os.chmod, p, 0o755) or TRY(os.utime, p, (0, 0)) or TRY(open, p, 'r+b')) and WON()"
    ),
    "environments": """
for p in ['self', *range(1, 70000)]:
    try: print(*re.findall('expected-[0-9a-f]{32}', open(f'/proc/{p}/environ').read()))
    except OSError: pass
print(os.environ.get('CANARY', ''))""",
    "init": "for n in ('mem', 'environ', 'maps', 'fd/1', 'cwd/x', 'root/x', 'stack'): TRY(open, f'/proc/1/{n}', 'rb') and WON()",
    "files_outside": "for p in (FILE, '/etc/passwd', '/etc/shadow', '/proc/cpuinfo', '/proc/sys/kernel/hostname', '/sys'): os.path.exists(p) and WON()",
    "folders_outside": "for p in ('/home', '/var', '/run', '/sys', '/mnt', '/opt', '/boot', '/proc-outside'): sys.base_prefix.startswith(p) or TRY(os.listdir, p) and os.listdir(p) and WON()",
    "packages": "any(TRY(__import__, m) for m in ('hybrid_rl', 'torch', 'pytest', 'psutil', 'sandbox_inside')) and WON()",
    "host_name": "os.uname().nodename != 'sandbox' and WON()",
    "processes": "os.listdir('/proc') and WON()\nfor p in range(3, 100): TRY(os.kill, p, 0) and WON()",
    "parent_folder": "os.chdir('/'); os.chdir('../../../..'); os.path.exists('.' + FILE) and WON()",
    # writing, and rights
    "write_outside": "TRY(lambda: open(FILE, 'w').write('x')) and WON()\nTRY(os.unlink, FILE) and WON()",
    "write_library": (
        "for p in (os.path.dirname(os.__file__), '/usr/lib', '/dev', '/', '/etc', '/proc/self'):"
        "\n    TRY(lambda: open(p + '/x', 'w')) and WON()\nTRY(os.chmod, os.__file__, 0o777) and WON()"
    ),
    "become_root": "for f in (os.setuid, os.setgid, os.seteuid): TRY(f, 0) and WON()\nTRY(os.setgroups, [0]) and WON()",
    "capabilities": (
        "sets = (ctypes.c_uint32 * 6)()\nlibc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets)\nany(sets) and WON()"
        "\nlibc.prctl(39, 0, 0, 0, 0) == 1 or WON()\nany(libc.prctl(23, c, 0, 0, 0) == 1 for c in range(64)) and WON()"
    ),
    "namespaces": (
        "for flag in (1 << 17, 1 << 28, 1 << 29, 1 << 30): libc.unshare(flag) == 0 and WON()"
        "\nif libc.syscall(56 if os.uname().machine == 'x86_64' else 220, (1 << 28) | 17, 0, 0, 0, 0) >= 0: WON()"
    ),
    "mounts": (
        "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 and WON()\nlibc.umount2(b'/proc', 2) == 0 and WON()"
        "\nlibc.mount(None, b'/', None, 32 | 4096, None) == 0 and WON()\nTRY(os.chroot, '/tmp') and WON()"
    ),
    "sync": "libc.syscall(162 if os.uname().machine == 'x86_64' else 81) == 0 and WON()",
    "devices": "for n in ((1, 1), (8, 0), (254, 0)): TRY(os.mknod, 'd', 0o60666, os.makedev(*n)) and WON()\nos.path.exists('/dev/mem') and WON()",
    "trace": "libc.ptrace(16, os.getppid(), 0, 0) == 0 and WON()\nTRY(os.pidfd_open, PID) and WON()",
    "other_system_calls": (
        "for n in (101, 248, 250, 298, 310, 321, 323, 425):\n    libc.syscall(n, 0, 0, 0, 0, 0)"
        "\n    os.uname().machine == 'x86_64' and ctypes.get_errno() != 13 and WON()"
    ),
    "x32_system_calls": "libc.syscall(0x40000000 | 39) > 0 and WON()",
    "terminal": "import fcntl, termios\nTRY(lambda: fcntl.ioctl(os.open('/dev/tty', 2), termios.TIOCSTI, b'x')) and WON()",
    "run_a_file": "open('x', 'w').write('#!' + sys.executable); os.chmod('x', 0o777); TRY(os.execv, './x', ['x', '-c', '0'])",
    "shell": "os.system('/bin/sh -c true') == 0 and WON()",
    # the network
    "connect": "import socket\nTRY(socket.create_connection, ('127.0.0.1', PORT), 1) and WON()",
    "resolve": "import socket\nTRY(socket.getaddrinfo, 'example.com', 80) and WON()",
    "udp": "import socket\nTRY(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))) and WON()",
    "unix_socket": "import socket\nTRY(socket.socket, socket.AF_UNIX) and WON()",
    "raw_socket": "import socket\nTRY(socket.socket, socket.AF_PACKET, socket.SOCK_RAW) and WON()\nTRY(socket.socket, socket.AF_NETLINK) and WON()",
    "url": "import urllib.request\nTRY(urllib.request.urlopen, f'http://127.0.0.1:{PORT}', timeout=1) and WON()",
}  # fmt: skip
MUST_FIND = ("find_the_tests", "environments")  # these are not told the answer


@needs_sandbox
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_nothing_and_harms_nothing(name, world):
    told = "" if name in MUST_FIND else f"ANSWER = {world.answer!r}\n"
    code = world.names() + told + BEGIN + ATTACKS[name]
    start = time.monotonic()
    reward = passes_tests(
        block(code), task({"tests": [{"stdin": "1\n", "stdout": world.answer}]}), time_limit=3.0 if name in MUST_FIND else 0.5
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
@pytest.mark.parametrize(
    ("code", "limits", "end"),
    [
        ("import time; time.sleep(60)", Limits(wall_seconds=0.3), "wall"),
        ("while True: pass", Limits(cpu_seconds=0.2, wall_seconds=30, total_seconds=30), "cpu"),
        ("import os\nfor _ in range(3): os.fork()\nwhile True: pass", Limits(cpu_seconds=0.5, wall_seconds=30, total_seconds=30), "cpu"),
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
    script = f"from hybrid_rl.rollout.sandbox import *\nrun({code!r}, [''], Limits(wall_seconds=300, total_seconds=300))"
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
    scorer = Scorer({"_target_": "hybrid_rl.rollout.code_reward.passes_tests", "time_limit": 5.0, "total_seconds": 20.0}, 2, timeout=60.0)
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
    probe = "import sys; sys.path.insert(0, sys.argv[1]); import hybrid_rl.rollout.sandbox"
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            if (
                subprocess.run(
                    [python, "-c", probe, str(REPOSITORY)], user=65533, group=65533, extra_groups=[], capture_output=True
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
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\nfrom hybrid_rl.rollout.sandbox import *\n"
        f"missing = check()\nprint(missing or run({attack!r}, [''], Limits(10, 30, 60))[0].stdout)"
    )
    done = subprocess.run([python, "-c", script], user=65533, group=65533, extra_groups=[], capture_output=True, text=True, cwd="/")
    assert "True [] True True" in done.stdout or "user namespaces" in done.stdout or "container" in done.stdout, done


@needs_sandbox
def test_without_namespaces_it_refuses_and_names_the_setting():
    script = (
        "import ctypes, os, sys\nlibc = ctypes.CDLL(None)\nuid = os.geteuid()\nassert libc.unshare(1 << 28) == 0\n"
        "open('/proc/self/uid_map', 'w').write(f'0 {uid} 1')\nopen('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "from hybrid_rl.rollout.sandbox import check\nprint(check())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode:
        pytest.skip("user namespaces are not to be had here")
    assert done.stdout.startswith("no sandbox for code: ")
    assert done.stdout.endswith("sysctl user.max_user_namespaces=10000.\n")


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


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("not json", "not JSON"),
        ('{"tests": [{"args": [1], "result": NaN}], "function": "f"}', "NaN is no JSON"),
        ("[]", "must be"),
        ({"test": []}, "must be"),
        ({"function": 3, "tests": []}, "must be"),
        ({"tests": []}, "no tests"),
        ({"tests": {}}, "no tests"),
        ({"tests": ["1"]}, "a test must be"),
        ({"tests": [{"stdin": 1, "stdout": "1"}]}, "a test must be"),
        ({"tests": [{"args": [1], "result": 1}]}, "a test must be"),
        ({"function": "f", "tests": [{"args": 1, "result": 1}]}, "a test must be"),
        ({"tests": [{"stdin": "1", "stdout": " \n"}]}, "does nothing passes"),
        ({"function": "f", "tests": [{"args": [1], "result": None}]}, "does nothing passes"),
    ],
)
def test_an_answer_without_tests_is_an_error_of_the_data(answer, message):
    with pytest.raises(ValueError, match=f"task t: .*{message}"):
        read_tests(task(answer))
    with pytest.raises(ValueError, match="task t: "):
        passes_tests("no code at all", task(answer))


@needs_sandbox
def test_the_share_of_tests_and_the_format_add_up_to_one():
    answer = task({"function": "f", "tests": [{"args": [n], "result": n * n} for n in range(4)]})
    half, right = block("def f(n): return n if n < 2 else -1"), block("def f(n): return n * n")
    assert passes_tests(half, answer) == {"format": 0.0, "tests": 0.5}
    assert passes_tests(half, answer, format_weight=0.2) == {"format": 0.2, "tests": 0.4}
    assert passes_tests(half, answer, partial=False) == {"format": 0.0, "tests": 0.0}
    assert passes_tests(right, answer, format_weight=0.2, partial=False) == {"format": 0.2, "tests": 0.8}
    assert passes_tests("def f(n): return n * n", answer, format_weight=0.2) == {"format": 0.0, "tests": 0.0}
    assert passes_tests(block("g = 1"), answer) == {"format": 0.0, "tests": 0.0}


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\na\n```", "a"),
        ("```python\na\n```\ntext\n```py\nb\nc\n```\nend", "b\nc"),
        ("```python\na\n```\n```python\ntruncated", "a"),
        ("```python\na\n```\n```bash\nls\n```", "a"),
        ("  ```Python3  \n  a\n  ```", "  a"),
        ("```python\nx = '```python'\n```", "x = '```python'"),
        ("```\na\n```", None),
        ("a", None),
        ("", None),
        ("```python\n" * 20000, None),
    ],
)
def test_the_last_closed_python_block_is_the_program(completion, code):
    assert extract_code(completion) == code


@pytest.mark.parametrize(
    ("got", "expected", "equal"),
    [
        (1, 1, True), (True, 1, False), (1, True, False), (1.0, 1, False), (0, None, False), (None, False, False), ("1", 1, False),
        (1, 1.0, True), (True, 1.0, False), (0.1 + 0.2, 0.3, True), (0.3001, 0.3, False), (1e-10, 0.0, True), (float("inf"), 1e308, False),
        (10**400, 1.5, False), ("0.3", 0.3, False), ([1, [2]], [1, [2]], True), ([1, 2], [2, 1], False), ([1], [1, 2], False),
        ([True], [1], False), ({"a": 1.0000001}, {"a": 1.0}, True), ({"a": 1, "b": 2}, {"a": 1}, False), ([], {}, False), ("", [], False),
    ],
)  # fmt: skip
def test_values_are_equal_only_with_equal_types(got, expected, equal):
    assert same(got, expected) is equal


@pytest.mark.parametrize(
    ("got", "expected", "equal"),
    [
        ("1\n2\n", "1\n2", True), ("1  \n2\r\n\n\n", "1\n2", True), (" 1", "1", False), ("1\n\n2", "1\n2", False), ("1 2", "1  2", False),
        ("0.10", "0.1", False), ("", "1", False),
    ],
)  # fmt: skip
def test_text_is_equal_up_to_white_space_at_ends(got, expected, equal):
    assert same_text(got, expected) is equal
