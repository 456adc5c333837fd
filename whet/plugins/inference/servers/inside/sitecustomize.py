# SPDX-License-Identifier: Apache-2.0
"""Runs at the start of every Python process of a server, and ends the process when its parent process ends.

vLLM's engine process does not notice that its parent was killed. Python imports this file by its name, since its folder
is on the server's PYTHONPATH."""

import ctypes
import importlib.abc
import importlib.util
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1

ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Torchvision(importlib.abc.MetaPathFinder):
    """Makes a CUDA build of torchvision importable with a CPU build of torch. torchvision's library cannot be loaded
    then, so this class declares the two operators that torchvision's Python code needs."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Returns None, so that the usual import follows; declares the operators before torchvision is imported."""
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        found = importlib.util.find_spec(name)
        if found is None or found.origin is None or torch.version.cuda is not None:
            return
        if "+cu" in Path(found.origin).with_name("version.py").read_text():
            boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            for operator in ("nms", "qnms"):
                with suppress(RuntimeError):  # another stand-in has declared it
                    torch.library.define(f"torchvision::{operator}", boxes)


sys.meta_path.insert(0, Torchvision())
