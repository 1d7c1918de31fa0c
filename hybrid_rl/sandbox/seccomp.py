"""Which system calls a program in the sandbox may make, as a seccomp filter (classic BPF)."""

from __future__ import annotations

import errno
import struct

from hybrid_rl.sandbox.inside import AF_UNIX, NAMESPACES, SIGCHLD

# name → number on x86_64, on aarch64 The program must not make these calls. They reach other processes, make namespaces
# or mounts, open sockets or enlarge their buffers, hold memory that no limit counts (memfd, System V IPC, queues of
# inotify, pages in a pipe that no process maps), use up what the whole machine shares (io_setup), make it wait (sync),
# or widen the access to the kernel.
DENIED = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "inotify_init": (253, 26),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "setsockopt": (54, 208),
    "socket": (41, 198),
    "splice": (275, 76),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "syslog": (103, 116),
    "tee": (276, 77),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
# These succeed and do nothing: they would act on the disk, the page cache or the locks of files shared with the
# machine.
IDLE = {
    "fadvise64": (221, 223),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "fsync": (74, 82),
    "msync": (26, 227),
    "sync_file_range": (277, 84),
}
SET_LOCK = (6, 7, 37, 38)  # the commands of fcntl that do the same as flock
CLONE, FCNTL, SIGACTION, SOCKETPAIR = (56, 220), (72, 25), (13, 134), (53, 199)  # the answer depends on an argument
CLONE3, NEWER = 435, 450  # Linux 5.17 and later added the calls from NEWER on: programs must do without them
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, audit architecture


def seccomp_filter(machine: str) -> bytes:
    """Return the filter's code for a machine of MACHINES.

    It answers DENIED with EACCES, does nothing for IDLE, and decides four calls by their arguments.
    """
    column, audit = MACHINES[machine]
    load, equal, at_least, any_bit, done = 0x20, 0x15, 0x35, 0x45, 0x06
    errors = 0x00050000
    allow, kill, idle = (done, 0, 0, 0x7FFF0000), (done, 0, 0, 0x80000000), (done, 0, 0, errors)
    refuse, missing = (done, 0, 0, errors | errno.EACCES), (done, 0, 0, errors | errno.ENOSYS)
    first, second = (load, 0, 0, 16), (load, 0, 0, 24)  # arguments
    rows = [(load, 0, 0, 4), (equal, 1, 0, audit), kill, (load, 0, 0, 0), (at_least, 0, 1, 1 << 30), refuse]
    rows += [(at_least, 0, 1, NEWER), missing, (equal, 0, 1, CLONE3), missing]  # libc then uses the older calls
    for numbers, verdict in ((DENIED, refuse), (IDLE, idle)):
        for row in numbers.values():
            rows += [(equal, 0, 1, row[column]), verdict]
    locks = [row for command in SET_LOCK for row in ((equal, 0, 1, command), idle)]
    for number, tests in (
        (CLONE, [first, (any_bit, 0, 1, NAMESPACES), refuse]),
        # if SIGCHLD is ignored, the kernel forgets what a child has used
        (SIGACTION, [first, (equal, 0, 1, SIGCHLD), refuse]),
        (SOCKETPAIR, [first, (equal, 1, 0, AF_UNIX), refuse]),
        (FCNTL, [second, *locks]),
    ):
        rows += [(equal, 0, len(tests) + 1, number[column]), *tests, allow]
    return b"".join(struct.pack("<HBBI", *row) for row in [*rows, allow])
