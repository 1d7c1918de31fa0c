"""Run a command without some system calls, as in a container that forbids them: python tests/refused.py unshare,mount COMMAND …"""

import ctypes
import errno
import os
import struct
import sys

CALLS = {  # x86_64, aarch64
    "capset": (126, 91), "clone": (56, 220), "memfd_create": (319, 279), "mount": (165, 40), "mount_setattr": (442, 442),
    "pidfd_open": (434, 434), "pivot_root": (155, 41), "prctl": (157, 167), "prlimit64": (302, 261), "setresuid": (117, 147),
    "setsid": (112, 157), "socketpair": (53, 199), "umount2": (166, 39), "unshare": (272, 97),
}  # fmt: skip


def refuse(names: list[str]) -> None:
    """From now on the calls give EPERM, in this process and all that it starts."""
    numbers = [CALLS[name][os.uname().machine == "aarch64"] for name in names]
    rows = [(0x20, 0, 0, 0)]
    for number in numbers:
        rows += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.EPERM)]
    code = b"".join(struct.pack("<HBBI", *row) for row in [*rows, (0x06, 0, 0, 0x7FFF0000)])
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    refuse(sys.argv[1].split(","))
    os.execv(sys.argv[2], sys.argv[2:])
