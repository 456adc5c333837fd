# SPDX-License-Identifier: Apache-2.0
"""Confines an unisolated program without privileges: Landlock restricts its files, and root becomes another user. This
file imports nothing of whet.

Landlock (Linux 5.13) covers opening, creating, removing, renaming and linking; since 6.2 truncating; since 6.7 TCP;
since 6.12 signals to other processes. It does not cover changes of modes and owners: whet_seccomp's filter does."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence
from functools import partial

LIBC = ctypes.CDLL(None, use_errno=True)
CREATE, ADD, RESTRICT = 444, 445, 446  # system calls, on every architecture
EXECUTE, WRITE, READ, LIST = 1, 2, 4, 8
DEVICE_NODES = 1 << 6 | 1 << 11  # the rights to make device nodes
OF_FILES = EXECUTE | WRITE | READ | 1 << 14 | 1 << 15  # rights that a rule on a file may have
RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # number of the rights, by the version since which there are that many
TCP_SINCE, SIGNALS_SINCE = 4, 6
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
CONFIGURATION = "alternatives group ld.so.cache localtime nsswitch.conf passwd ssl/openssl.cnf timezone"
SYSTEM = ("/proc", "/sys/devices/system/cpu", "/sys/fs/cgroup", *(f"/etc/{name}" for name in CONFIGURATION.split()))
NOBODY = 65534
READ_ALL = 1 << 2  # CAP_DAC_READ_SEARCH
CAPABILITIES = 0x20080522  # version of the call
KEEP_CAPABILITIES, NO_NEW_PRIVILEGES, AMBIENT, RAISE = 8, 38, 47, 2  # of prctl


def version() -> int:
    """Returns the version of the kernel's Landlock; 0 without Landlock."""
    return max(0, int(LIBC.syscall(CREATE, None, ctypes.c_size_t(0), 1)))


def leave_root(readable: Sequence[str]) -> None:
    """Changes from root to the user nobody. Keeps the capability to read all files only if that user cannot reach a
    folder in `readable` and Landlock confines the program.  Raises: PermissionError if root would stay unconfined."""
    if os.geteuid() != 0:
        return
    LIBC.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError as error:
        if version():
            _set_capabilities(0)
            return
        raise PermissionError(
            f"this user is root, the kernel has no Landlock, and changing the user fails ({error.strerror}), so a "
            "program could change the whole machine; start whet as another user"
        ) from error
    is_hidden = partial(filter, lambda path: not os.access(path, os.F_OK, effective_ids=True))
    if any(is_hidden(readable)) and version():
        _set_capabilities(READ_ALL)
    for hidden in is_hidden(readable):
        raise PermissionError(
            f"this user is root, so programs run as nobody, who cannot read {hidden}; expected a Python and folders "
            "that every user can read; start whet as another user, or move them"
        )


def hold(readable: Sequence[str], folder: str) -> None:
    """Restricts this process and its children: they read only files below `readable` and some files of the system, and
    write only below `folder`. Without Landlock in the kernel it restricts nothing.  Raises: OSError."""
    LIBC.prctl(AMBIENT, RAISE, 2, 0, 0)  # what leave_root has kept stays when another program is started
    LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if not (found := version()):
        return
    known = (1 << max(number for since, number in RIGHTS.items() if since <= found)) - 1
    header = struct.pack("QQQ", known, 3 if found >= TCP_SINCE else 0, 3 if found >= SIGNALS_SINCE else 0)
    ruleset = _call(CREATE, header, ctypes.c_size_t(len(header)), 0)
    rules = dict.fromkeys([*readable, *SYSTEM], EXECUTE | READ | LIST) | dict.fromkeys(DEVICES, READ | WRITE)
    for path, rights in [*rules.items(), (folder, known & ~DEVICE_NODES)]:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # this system does not have it, or this user may not see it
            continue
        allowed = rights if stat.S_ISDIR(os.fstat(descriptor).st_mode) else rights & OF_FILES
        _call(ADD, ruleset, 1, struct.pack("=Qi", allowed & known, descriptor), 0)
        os.close(descriptor)
    _call(RESTRICT, ruleset, 0)
    os.close(ruleset)


def open_beneath(folder: int, name: str) -> int:
    """Opens the file `name` below a folder without following links.  Raises: OSError."""
    *above, last = name.split("/")
    folder = os.dup(folder)
    try:
        for each in above:
            outer, folder = folder, os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(outer)
        return os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)


def _set_capabilities(kept: int) -> None:
    """Keeps only the capabilities `kept`. Changes nothing if the process lacks one, as root does in many containers."""
    LIBC.capset(struct.pack("Ii", CAPABILITIES, 0), struct.pack("6I", kept, kept, kept, 0, 0, 0))


def _call(number: int, *arguments: object) -> int:
    if (result := int(LIBC.syscall(number, *arguments))) < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
