# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the kernels of SGLang 0.5.23 on a CPU, imported at the start of every Python of its environment.

SGLang's kernels are built for CUDA alone. With this module each of their names can be imported, and calling one raises:
the server runs with what torch itself computes. torchvision's wheel is built for CUDA too; the two operators that it
wants to see are declared before it is imported. So are operators that some of SGLang's models name when imported."""

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

KERNELS = "sgl_kernel"
VERSION = "0.4.10"
BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


class Kernel:
    """A kernel that is not there, and a name space of such."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Any:
        """Returns any kernel below this name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raises: NotImplementedError."""
        raise NotImplementedError(f"{self.__name__} is a kernel for CUDA, and this environment has a stand-in for it")

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        """Gives no base, where a class is derived from a kernel."""
        return ()


class Finder:
    """Finds the kernels, and prepares torchvision's import."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """The specification of a module of kernels."""
        if name == "torchvision" and "torch" in sys.modules:
            _declare("torchvision", ("nms" + BOXES, "qnms" + BOXES))
        if name.partition(".")[0] != KERNELS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        """A module that has every name."""
        module: Any = types.ModuleType(spec.name)
        module.__version__ = VERSION
        module.__getattr__ = Kernel(spec.name).__getattr__
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        """Declares operators."""
        if module.__name__ == KERNELS:
            _declare(KERNELS, [name + "() -> ()" for name in OPERATORS])


def _declare(space: str, operators: Sequence[str]) -> None:
    import torch

    library = torch.library.Library(space, "FRAGMENT")
    for operator in operators:
        try:
            library.define(operator)
        except RuntimeError:  # torchvision's own operators are there
            return
    KEPT.append(library)


KEPT: list[Any] = []  # a library's operators go with it
sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
