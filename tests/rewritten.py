# SPDX-License-Identifier: Apache-2.0
"""Divides pytest's rewriting (the `assert` of test files) among the processes of a run: each would rewrite all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _rewrite_test, _write_pyc, assertstate_key, get_cache_dir


def rewrite_share(config: pytest.Config, files: list[Path]) -> None:
    """Writes this process's share of the files that were never written."""
    worker, count = os.environ["PYTEST_XDIST_WORKER"], int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    if sys.dont_write_bytecode:
        return
    for file in files[int(worker.removeprefix("gw")) :: count]:
        written = get_cache_dir(file) / f"{file.stem}{PYC_TAIL}"
        if not written.exists():
            written.parent.mkdir(exist_ok=True)
            digest, code = _rewrite_test(file, config)
            _write_pyc(config.stash[assertstate_key], code, digest, written)
