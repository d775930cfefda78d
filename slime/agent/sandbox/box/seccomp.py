"""A small system call filter: what a coding agent has no use for and what would reach past the namespaces.

Address families other than unix, inet, inet6 and netlink are refused (virtual sockets are not bound to a
network namespace), as are keyrings, bpf, perf, userfaultfd and io_uring (whose operations no filter sees).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from .syscalls import PR_SET_SECCOMP, prctl

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32_BIT = 0x40000000
_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink
# machine: (audit arch, socket, io_uring_setup, refused with EPERM)
_MACHINES = {
    "x86_64": (0xC000003E, 41, 425, (248, 249, 250, 298, 321, 323)),
    "aarch64": (0xC00000B7, 198, 425, (217, 218, 219, 241, 280, 282)),
}


def program() -> bytes | None:
    """The filter for this machine, or None where its call numbers are not known."""
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        return None
    arch, make_socket, io_uring, refused = machine
    lines = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    lines += [(_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    lines += [(_EQUAL, 0, 1, io_uring), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    lines += [(_EQUAL, 1, 0, make_socket), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
    for family in _FAMILIES:
        lines += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    lines.append((_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT))
    return b"".join(struct.pack("HBBI", code, true, false, value) for code, true, false, value in lines)


def install(filter_program: bytes) -> None:
    """Put the filter on this process and all that it starts; needs no_new_privs."""
    buffer = ctypes.create_string_buffer(filter_program, len(filter_program))
    head = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(filter_program) // 8, ctypes.addressof(buffer))
    )
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(head))
