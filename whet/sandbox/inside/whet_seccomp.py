# SPDX-License-Identifier: Apache-2.0
"""A filter of system calls (seccomp) for untrusted programs.

It denies what reaches other processes, other namespaces or the kernel's rarely used parts, sockets of every family but
those that an empty network namespace makes harmless, and memory that no limit counts. Denied calls fail with EPERM.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, AUDIT_ARCH
# By name: the numbers on x86_64 and aarch64; one number where they are equal, None where there is no such call.
DENIED: dict[str, tuple[int | None, ...]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440,),
    "pidfd_getfd": (438,), "kcmp": (312, 272),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428,), "move_mount": (429,), "fsopen": (430,), "fsconfig": (431,),
    "fsmount": (432,), "fspick": (433,), "mount_setattr": (442,),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425,),
    "io_uring_enter": (426,), "io_uring_register": (427,), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443,),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58), "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # memory that is in no process
    "memfd_create": (319, 279), "memfd_secret": (447,), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180),
}  # fmt: skip
# What Landlock does not hold: modes and owners of this user's files, and, on older kernels, lengths by path.
UNHELD: dict[str, tuple[int | None, ...]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452,), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "truncate": (76, 45), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "setxattrat": (463,), "removexattrat": (466,),
}  # fmt: skip
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
    """The filter for this machine's architecture, as an array of sock_filter. A program that is not isolated gets no
    sockets, by which it could ask services of this user for what it may not do.  Raises: OSError for another
    architecture."""
    if os.uname().machine not in ARCHITECTURES:
        raise OSError(
            errno.ENOSYS, f"no filter of system calls for {os.uname().machine}; there is one for x86_64, aarch64"
        )
    column, architecture = ARCHITECTURES[os.uname().machine]
    calls = [*DENIED.values(), *([] if isolated else UNHELD.values())]
    denied = [number for numbers in calls if (number := numbers[column if len(numbers) > 1 else 0]) is not None]
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
    """Puts this thread, and all that it starts, under the filter for ever.  Raises: OSError."""
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
