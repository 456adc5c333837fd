# SPDX-License-Identifier: Apache-2.0
"""A filter of system calls (seccomp) for untrusted programs.

It denies calls that reach other processes, other namespaces or rarely used parts of the kernel. It denies sockets,
except families that are harmless in an empty network namespace, and memory that escapes the limits. Denied calls fail
with EPERM."""

from __future__ import annotations

import csv
import ctypes
import errno
import os
import struct

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of numbers, AUDIT_ARCH
# The numbers of denied calls, by what they reach; empty where an architecture has no such call.
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "whet_syscalls.csv")) as _file:
    DENIED = [*csv.DictReader(_file)]
# What Landlock does not hold: modes and owners of files, and, on older kernels, lengths by path.
UNHELD = "this user's files"
CLONE, CLONE3, IOCTL, SOCKET, SOCKETPAIR = (56, 220), 435, (16, 29), (41, 198), (53, 199)
NEW_NAMESPACE = 0x7E020000  # the CLONE_NEW* flags
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # type into a terminal
X32 = 0x40000000  # numbers of another interface on x86_64

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in seccomp_data
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # of prctl


def program(*, isolated: bool) -> bytes:
    """Returns the filter for this machine's architecture, as an array of sock_filter. It denies all sockets to a
    program that is not isolated, since services of this user would act on its requests.  Raises: OSError for another
    architecture."""
    if os.uname().machine not in ARCHITECTURES:
        found = f"no filter of system calls for {os.uname().machine}; there is one for {', '.join(ARCHITECTURES)}"
        raise OSError(errno.ENOSYS, found)
    column, architecture = ARCHITECTURES[os.uname().machine]
    calls = [call for call in DENIED if not isolated or call["reaches"] != UNHELD]
    denied = [int(number) for call in calls if (number := call[os.uname().machine])]
    deny = _statement(_RETURN, _ERRNO | errno.EPERM)
    code = [_statement(_LOAD, _ARCHITECTURE), _jump(_EQUAL, architecture, 1, 0), _statement(_RETURN, _KILL)]
    code += [_statement(_LOAD, _NUMBER), _jump(_AT_LEAST, X32, 0, 1), deny]
    for number in denied:
        code += [_jump(_EQUAL, number, 0, 1), deny]
    code += [_jump(_EQUAL, CLONE3, 0, 1), _statement(_RETURN, _ERRNO | errno.ENOSYS)]  # the libraries then take clone
    code += [_jump(_EQUAL, CLONE[column], 0, 4), _statement(_LOAD, _FIRST), _jump(_ANY_BIT, NEW_NAMESPACE, 0, 1), deny]
    code += [_statement(_RETURN, _ALLOW)]
    code += [_jump(_EQUAL, IOCTL[column], 0, 5), _statement(_LOAD, _SECOND)]
    code += [_jump(_EQUAL, TIOCSTI, 1, 0), _jump(_EQUAL, TIOCLINUX, 0, 1), deny, _statement(_RETURN, _ALLOW)]
    for numbers, families in ((SOCKET, FAMILIES if isolated else ()), (SOCKETPAIR, FAMILIES)):
        code += [_jump(_EQUAL, numbers[column], 0, len(families) + 3), _statement(_LOAD, _FIRST)]
        code += [_jump(_EQUAL, family, len(families) - place, 0) for place, family in enumerate(families)]
        code += [_statement(_RETURN, _ERRNO | errno.EAFNOSUPPORT), _statement(_RETURN, _ALLOW)]
    return b"".join([*code, _statement(_RETURN, _ALLOW)])


def install(filter_: bytes) -> None:
    """Applies the filter permanently to this thread and to all processes that it starts.  Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(filter_, len(filter_))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filter_) // 8, ctypes.addressof(code)))
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.addressof(header), 0, 0)):
        if libc.prctl(*map(ctypes.c_ulong, arguments)):
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _statement(code: int, value: int) -> bytes:
    return _jump(code, value, 0, 0)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
