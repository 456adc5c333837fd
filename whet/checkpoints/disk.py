# SPDX-License-Identifier: Apache-2.0
"""Conversion of file errors (disk full, no permission) to StorageError."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whet.checkpoints import checkpoint
from whet.errors import StorageError, WhetError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextmanager
def disk_errors(path: Path, key: str = "trainer.run_dir") -> Iterator[None]:
    """Converts errors on the files of a run to StorageError, which explains how to continue. `key` names the folder
    in the message."""
    try:
        yield
    except OSError as error:
        whole, named = path.absolute(), Path(os.fsdecode(error.filename) if error.filename else "").absolute()
        if isinstance(error, WhetError):
            raise
        if error.errno not in NO_ROOM:
            if not error.filename or not (named.is_relative_to(whole) or whole.is_relative_to(named)):
                raise
            raise StorageError(
                f"{error.filename}: {error.strerror}; expected a folder that can be written to: correct its "
                f"permissions, remove the file in its place, or choose another {key}"
            ) from error
        last = checkpoint.newest(path)
        again = "starts afresh" if last is None else f"goes on from {last}"
        raise StorageError(
            f"{error.filename or path}: {error.strerror} ({shutil.disk_usage(path).free / 2**20:,.0f} MiB are free "
            f"there); make room, then start the same command again (with trainer.resume=auto): it {again}"
        ) from error
