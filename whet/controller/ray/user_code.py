# SPDX-License-Identifier: Apache-2.0
"""Sends user code to every node, so that each node can import the functions and classes that a run names.

The code is the Python files in the caller's working folder and in the folders that the caller added to sys.path. If a
node has the same files by checksum (the same machine, a shared file system), it uses them in place, so relative paths
keep their meaning. Otherwise the files are unpacked into a temporary folder, which becomes the working folder."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path

log = logging.getLogger(__name__)
MAX_FILES, MAX_SEEN = 5_000, 200_000  # Python files, files of any kind
FORWARDED = (  # first letters of the environment variables that every node gets
    *("CUDA_DEVICE_ORDER", "GLOO_", "HF_", "NCCL_", "PYTORCH_", "SGLANG_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_"),
    *("VLLM_", "WHET_"),
)


@dataclass(frozen=True)
class UserCode:
    """The code of the user's process, with the settings that another process needs to import it."""

    folder: str  # the working folder
    path: tuple[str, ...]  # the user's entries of sys.path
    main: Mapping[str, str]  # the main module or file, as in multiprocessing.spawn
    archive: bytes  # zip of the files under their absolute paths
    environment: Mapping[str, str]  # variables to set

    @classmethod
    def of_this_process(cls) -> UserCode:
        """Collects the code of the calling process."""
        resolved = [str(Path(entry or ".").resolve()) for entry in sys.path]
        folder, path = str(Path.cwd()), [entry for entry in resolved if _is_users(entry)]
        sent = [entry for entry in path if not Path(entry, "whet", "controller").is_dir()]  # nodes have whet
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in _python_files([folder, *sent]):
                with contextlib.suppress(OSError):  # not readable, or just deleted
                    archive.writestr(str(file.relative_to(file.anchor)), file.read_bytes())
        return cls(
            folder=folder,
            path=tuple(path),
            main={k: v for k, v in spawn.get_preparation_data("").items() if k.startswith("init_main") and v},
            archive=packed.getvalue(),
            environment={name: value for name, value in os.environ.items() if name.startswith(FORWARDED)},
        )

    def install(self) -> None:
        """Makes the code importable in this process, and imports the main module like `multiprocessing.spawn`."""
        os.environ.update(self.environment)
        with zipfile.ZipFile(io.BytesIO(self.archive)) as archive:
            root = "" if self._is_here(archive.infolist()) else self._unpacked(archive)
        sys.path[:0] = [entry for entry in (f"{root}{each}" for each in self.path) if entry not in sys.path]
        main = dict(self.main)
        if "init_main_from_path" in main:
            main["init_main_from_path"] = f"{root}{main['init_main_from_path']}"
        if not Path(main.get("init_main_from_path", "/")).exists():
            main = {}
        spawn.prepare({"dir": f"{root}{self.folder}", **main})

    def _is_here(self, files: list[zipfile.ZipInfo]) -> bool:
        try:
            same = (zlib.crc32(Path("/", file.filename).read_bytes()) == file.CRC for file in files)
            return Path(self.folder).is_dir() and all(same)
        except OSError:
            return False

    def _unpacked(self, archive: zipfile.ZipFile) -> str:
        root = tempfile.mkdtemp(prefix="whet-code-")
        archive.extractall(root)
        Path(f"{root}{self.folder}").mkdir(parents=True, exist_ok=True)
        return root


def _is_users(entry: str) -> bool:
    """Tells whether an entry of sys.path is a folder of the user, not of an installation."""
    installed = {Path(place).resolve() for place in (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())}
    path = Path(entry)
    return path.is_dir() and "site-packages" not in path.parts and not any(map(path.is_relative_to, installed))


def _python_files(folders: list[str]) -> Iterator[Path]:
    """Yields the Python files below the folders, except in hidden folders and virtual environments."""
    found: dict[Path, None] = {}
    seen = 0
    for folder in dict.fromkeys(folders):
        for place, names, files in os.walk(folder):
            hidden = [name for name in names if name.startswith(".") or name in ("__pycache__", "site-packages")]
            here = Path(place)
            names[:] = [name for name in names if name not in hidden and not (here / name / "pyvenv.cfg").exists()]
            found |= dict.fromkeys(here / name for name in files if name.endswith(".py"))
            seen += len(files)
            if len(found) > MAX_FILES or seen > MAX_SEEN:
                log.warning(
                    "%s has too many files to send its Python code to the nodes; start in a smaller folder", folder
                )
                return
    yield from found
