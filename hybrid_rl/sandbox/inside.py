"""The code inside the sandbox: it makes namespaces, a root and limits, then runs the program. `sandbox.run` starts it.

    launcher   a new Python without environment: enters new user/mount/network/IPC/UTS/cgroup namespaces, makes the root
      keeper   one for each input: enters a new PID and mount namespace, kills the init that outlives its time
        init   PID 1 there: mounts /tmp, gives up every right, collects the output, measures, kills everything
          program

Only the program runs what the model wrote. It gets its input and nothing else; its output is data for the caller.
This module uses little of the standard library and nothing else: imports take most of the time of a launch.
"""

from __future__ import annotations

import _signal  # signal and socket import enum, which takes as long as all the rest
import _socket
import _thread
import ctypes
import errno
import marshal
import os
import resource
import select
import struct
import sys
import time

TYPE_CHECKING = False  # typing takes long to import, too
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

# How an input ended. "exit": by itself (with an exit code, or a negative signal); "wall" to "output": at that limit;
# "died": init was lost (the system ran out of memory); "not run": the time for all inputs was used up; "setup": no
# sandbox could be made.
ENDS = ("exit", "wall", "cpu", "memory", "output", "died", "not run", "setup")
FRAME = struct.Struct("<BiIII")  # end, exit code, bytes of standard output, of standard error, of the result
KEEPER_GRACE = 2.0  # seconds that init has to end by itself after the time of an input
INTERPRETER = 32 << 20  # bytes of resident memory beyond a program's limit, for the interpreter itself
POLL_MS = 20  # between two measurements of memory and CPU time
STACK = 32 << 20  # bytes of address space for the stack of a process, and of each thread that a program may have
THREAD_STACK = 8 << 20  # bytes that threads get unless the program chooses
NOBODY = 65534
OUTER_PROC = "/proc-outside"  # kept until init mounts its own: the kernel requires a whole /proc to be visible

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = 2, -100, 0x8000, 442
NEWNS, NEWCGROUP = 1 << 17, 1 << 25
NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
SIGINT, SIGKILL, SIGCHLD, AF_UNIX = 2, 9, 17, 1
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}  # libc has no function for this call

_libc = ctypes.CDLL(None, use_errno=True)


def launch(request: dict[str, Any]) -> None:
    """Run the launcher: write a frame for each input to standard output. Inputs stay in the file at standard input."""
    deadline = time.monotonic() + request["total"]
    try:
        _die_with_parent()
        if os.getppid() != request["parent"]:
            return
        if request["function"]:
            import json  # noqa: F401  # once here instead of in each program
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # if memory runs out, the system kills this process first
        request["uid"] = _enter_namespaces()
        _build_root()
        place = os.lseek(0, 0, os.SEEK_CUR)
        for size in request.pop("sizes"):
            wall = min(request["wall"], deadline - time.monotonic())
            if wall <= 0:
                _send("not run")
            else:
                os.waitpid(_fork(_keep, request, (place, size), wall), 0)
            place += size
    except OSError as error:
        _send("setup", stderr=str(error).encode())


def _call(name: str, *arguments: Any, about: object = "") -> None:
    """Call a libc function by name. Raises OSError with the name, what it was about, and the reason."""
    if getattr(_libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{f' {about}' if about else ''}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind and kind.encode(), flags, options.encode(), about=target)


def _die_with_parent() -> None:
    _call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def _fork(function: Callable[..., None], *arguments: Any) -> int:
    """Fork a child that calls `function` and exits, with status 1 after an exception. Return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        function(*arguments)
        status = 0
    finally:
        os._exit(status)


def _send(end: str, code: int = 0, stdout: bytes = b"", stderr: bytes = b"", result: bytes = b"") -> None:
    frame = memoryview(
        FRAME.pack(ENDS.index(end), code, len(stdout), len(stderr), len(result)) + stdout + stderr + result
    )
    while frame:
        frame = frame[os.write(1, frame) :]


def _enter_namespaces() -> int | None:
    """Enter new namespaces. Return the user id to take on later, None if a user namespace already gave one.

    Root needs no user namespace. Its program gets a user id that nobody else has, so that limits on processes count
    only this program's.
    """
    flags = NEWNS | NEWNET | NEWIPC | NEWUTS | NEWCGROUP
    own = next(filter(_mapped, ((1 << 30) + os.getpid(), NOBODY)), None) if os.geteuid() == 0 else None
    if own is not None:
        try:
            _call("unshare", flags)
        except PermissionError:  # root of a container without CAP_SYS_ADMIN: go on as an ordinary user
            _become(own)
            _call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root
        else:
            _call("sethostname", b"sandbox", 7)
            return own
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", flags | NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _call("sethostname", b"sandbox", 7)
    return None


def _mapped(uid: int) -> bool:
    """Return whether the user id exists here: the user namespace of a container may have only a few."""
    with open("/proc/self/uid_map") as file:
        return any(int(first) <= uid < int(first) + int(count) for first, _, count in map(str.split, file))


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _die_with_parent()  # a change of user clears it


def _build_root() -> None:
    """Replace the root with one that holds Python's and the system's libraries and five devices, all read-only."""
    python = sys.executable
    prefixes = dict.fromkeys(("", "/usr", sys.base_prefix, sys.base_exec_prefix))
    folders = [f"{prefix}/{lib}" for prefix in prefixes for lib in ("lib", "lib64")]
    shown = [*folders, "/nix/store", "/usr/share/zoneinfo", "/etc/ld.so.cache", python]
    found = {path: os.path.realpath(path) for path in shown if os.path.exists(path)}

    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    _call("syscall", PIVOT_ROOT[os.uname().machine], b"/tmp", b"/tmp/old", about="pivot_root")
    os.chdir("/")
    for path, real in found.items():
        _bind(real, path)
    for folder in folders:
        for name in os.listdir(folder) if folder in found else ():
            for packages in (f"{folder}/{name}/site-packages", f"{folder}/{name}/dist-packages"):
                if name.startswith("python") and os.path.isdir(packages):
                    _mount("tmpfs", packages, "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,mode=755")
    for name in ("null", "zero", "full", "random", "urandom"):
        _bind(f"/dev/{name}", f"/dev/{name}")
    os.symlink("/tmp", "/dev/shm")
    os.makedirs("/proc", exist_ok=True)
    os.makedirs("/tmp", exist_ok=True)
    _bind("/proc", OUTER_PROC)
    _call("umount2", b"/old", MNT_DETACH, about="the old root")
    os.rmdir("/old")
    attributes = struct.pack("<4Q", MS_RDONLY | MS_NOSUID, 0, 0, 0)
    _call(
        "syscall", SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, len(attributes), about="mount_setattr"
    )


def _bind(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(f"/old{source}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(f"/old{source}", target, None, MS_BIND | MS_REC)


def _keep(request: dict[str, Any], place: tuple[int, int], wall: float) -> None:
    """Run the keeper: one input in namespaces of its own. Leave init's frame, or one that says why there is none."""
    start, init, problem = os.lseek(1, 0, os.SEEK_CUR), 0, ""
    try:
        _die_with_parent()
        _call("unshare", NEWNS | NEWPID)
        init = _fork(_init, request, place, wall)
        waiting = select.poll()
        waiting.register(os.pidfd_open(init))
        waiting.poll((wall + KEEPER_GRACE) * 1000)
    except OSError as error:
        problem = str(error)
    status = 0
    if init:
        os.kill(init, SIGKILL)  # nothing happens if it has ended by itself
        _, status = os.waitpid(init, 0)  # returns after the kernel has killed everything in the namespace
    if status or problem:
        os.ftruncate(1, start)
        os.lseek(1, start, os.SEEK_SET)
        _send("setup" if problem else "died", stderr=problem.encode())


def _init(request: dict[str, Any], place: tuple[int, int], wall: float) -> None:
    """Run PID 1: signals from inside do not reach it, and everything else in its namespace ends with it."""
    try:
        _die_with_parent()
        _signal.signal(SIGINT, _signal.SIG_DFL)  # a handler would let it through
        os.setsid()  # else a signal from inside to the process group would reach keeper and launcher
        owner = "" if request["uid"] is None else f",uid={request['uid']},gid={request['uid']}"
        options = f"size={request['disk']},nr_inodes=4096,mode=700{owner}"
        _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
        _mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
        with open("/proc/self/statm") as file:
            request["mapped"] = int(file.read().split()[0]) * resource.getpagesize()
        proc = os.open("/proc", os.O_DIRECTORY)
        for path in ("/proc", OUTER_PROC):  # /proc/self/exe leads to the old root, which is not read-only
            _call("umount2", path.encode(), MNT_DETACH, about=path)
        os.chdir("/tmp")
        if not os.path.exists(os.__file__):
            raise OSError(
                errno.EACCES,
                f"the Python installation {sys.base_prefix} lies under /tmp, or user {os.getuid()} may not read it",
            )
        data = os.pread(0, place[1], place[0])
        stdin = os.memfd_create("stdin")
        with open(stdin, "wb", closefd=False) as file:
            file.write(b"" if request["function"] else data)
        os.lseek(stdin, 0, os.SEEK_SET)
        one, other = _socket.socketpair()
        buffer = one.getsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF)
        one.close()
        other.close()
        _give_up_rights(request["uid"], request["filter"])
        pipes = [os.pipe() for _ in range(4)]
        child = _fork(_program, request, data, stdin, [write for _, write in pipes])
        ended = os.pidfd_open(child)
        for _, write in pipes:
            os.close(write)
        reads = [read for read, _ in pipes]
        if problem := os.read(reads.pop(), 1 << 12):  # empty once the program has begun, which cannot write here
            return _send("setup", stderr=problem)
        _usage(proc, buffer)  # if measuring fails, it fails here, and does not count against the program
    except OSError as error:
        return _send("setup", stderr=str(error).encode())
    end, code, outputs = _supervise(child, ended, lambda: _usage(proc, buffer), reads, request, time.monotonic() + wall)
    _send(end, code, *outputs)


def _give_up_rights(uid: int | None, code: bytes) -> None:
    """Drop all capabilities, now and for any later exec, hide this process from others, and load the seccomp `code`."""
    for capability in range(64):
        _libc.prctl(PR_CAPBSET_DROP, ctypes.c_long(capability), 0, 0, 0)  # fails for those this kernel does not have
    if uid is not None:
        _become(uid)
    _call("capset", struct.pack("<II", 0x20080522, 0), bytes(24))
    _call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _call("prctl", PR_SET_SECCOMP, 2, program, 0, 0, about="seccomp")


def _supervise(
    child: int,
    ended: int,
    usage: Callable[[], tuple[float, int]],
    pipes: list[int],
    request: dict[str, Any],
    deadline: float,
) -> tuple[str, int, list[bytes]]:
    """Collect output until the program ends or exceeds a limit, then kill all. Return end, exit code, outputs."""
    outputs = {pipe: bytearray() for pipe in pipes}
    waiting = select.poll()
    for descriptor in (ended, *pipes):
        waiting.register(descriptor, select.POLLIN)
    end = ""
    while not end:
        for descriptor, _ in waiting.poll(POLL_MS):
            if descriptor == ended:
                end = "exit"
            elif not _read(descriptor, outputs[descriptor]):
                waiting.unregister(descriptor)
        cpu, memory = usage()
        if cpu > request["cpu"]:
            end = "cpu"
        elif memory > request["memory"] + INTERPRETER:
            end = "memory"
        elif any(len(output) > request["output"] for output in outputs.values()):
            end = "output"
        elif not end and time.monotonic() > deadline:
            end = "wall"
    code = 0
    try:
        os.kill(-1, SIGKILL)
        while True:
            pid, status = os.waitpid(-1, 0)
            code = os.waitstatus_to_exitcode(status) if pid == child else code
    except (ProcessLookupError, ChildProcessError):  # none left
        pass
    for pipe, output in outputs.items():
        while _read(pipe, output):  # at most what the pipe holds: all writers are dead
            pass
    if end == "exit" and any(len(output) > request["output"] for output in outputs.values()):
        end = "output"
    return end, code, [bytes(output[: request["output"]]) for output in outputs.values()]


def _read(descriptor: int, output: bytearray) -> int:
    chunk = os.read(descriptor, 1 << 16)
    output += chunk
    return len(chunk)


def _usage(proc: int, buffer: int) -> tuple[float, int]:
    """Return CPU seconds and bytes of memory of all processes here but init; zombies count until they are reaped.

    Memory is the resident set, and `buffer` bytes for each socket: what a program leaves in a socket is in no process.
    """
    ticks = pages = 0
    for name in os.listdir(proc):
        if name.isdigit() and name != "1":
            try:
                fields = _stat(proc, name)
                held = int(fields[21])
                if fields[0] == b"Z":  # its other threads may still run, and hold the memory
                    tasks = os.open(f"{name}/task", os.O_RDONLY, dir_fd=proc)
                    try:
                        held = max(int(_stat(tasks, task)[21]) for task in os.listdir(tasks))
                    finally:
                        os.close(tasks)
            except (OSError, ValueError):  # it has just ended
                continue
            ticks += sum(map(int, fields[11:15]))
            pages += held
    with open(os.open("1/net/sockstat", os.O_RDONLY, dir_fd=proc), "rb") as file:
        sockets = int(file.readline().split()[-1])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * resource.getpagesize() + sockets * buffer


def _stat(folder: int, name: str) -> list[bytes]:
    with open(os.open(f"{name}/stat", os.O_RDONLY, dir_fd=folder), "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _program(request: dict[str, Any], data: Any, stdin: int, outputs: list[int]) -> NoReturn:
    """Run what the model wrote, then os._exit. Errors before the program begins go to the last of `outputs`."""
    report = 4
    try:
        for target, descriptor in enumerate((stdin, *outputs)):  # to 0 … 4
            os.dup2(descriptor, target)
        os.closerange(report + 1, 256)  # init has far fewer
        _signal.signal(SIGINT, _signal.default_int_handler)
        _thread.stack_size(THREAD_STACK)
        code, function = request["code"], request["function"]
        arguments = marshal.loads(data) if function else ()
        _limit(request)
        for number, (name, mode, errors) in enumerate(
            (("stdin", "r", "strict"), ("stdout", "w", "strict"), ("stderr", "w", "backslashreplace"))
        ):
            stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    except BaseException as error:
        os.write(report, (str(error) or type(error).__name__).encode())
        os._exit(1)
    os.close(report)
    sys.modules.pop(__name__)
    request.clear()
    status = 0
    try:
        _execute(code, function, arguments)
    except SystemExit as stop:
        status = stop.code & 255 if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        status = status or 1
    os._exit(status)


def _limit(request: dict[str, Any]) -> None:
    seconds = int(request["cpu"]) + 2
    for limit, value in {
        resource.RLIMIT_AS: request["mapped"] + request["memory"] + request["processes"] * STACK,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: request["disk"],
        resource.RLIMIT_NPROC: request["processes"] + 4,  # our own four processes may count too
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 1,  # 0 would still start a core handler of the system
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_STACK: STACK,
        resource.RLIMIT_SIGPENDING: 128,
    }.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value))
        except ValueError:  # Python raises it for EPERM
            raise OSError(errno.EPERM, f"setrlimit: {os.strerror(errno.EPERM)}") from None


def _execute(code: str, function: str | None, arguments: Any) -> None:
    import builtins
    import types

    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as in a Python that was started with site
    sys.argv = ["solution.py"]
    module = types.ModuleType("solution" if function else "__main__")
    sys.modules[module.__name__] = module
    exec(compile(code, "solution.py", "exec"), module.__dict__)  # noqa: S102  # safe: this process is the sandbox
    if function:
        import json

        result = json.dumps(getattr(module, function)(*arguments))
        with open(3, "w", encoding="utf-8") as file:
            file.write(result)
