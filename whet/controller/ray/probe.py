# SPDX-License-Identifier: Apache-2.0
"""Looks at a node from inside. Only the standard library: it travels by value, to nodes without whet too."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import metadata


class Probe:
    """Runs on one node of a cluster."""

    def versions(self, packages: Sequence[str]) -> dict[str, str]:
        """Of Python and of the packages that are installed."""
        found = {"python": platform.python_version()}
        for name in packages:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                try:  # on the Python path only
                    found[name] = importlib.import_module(name).__version__
                except (ImportError, AttributeError):
                    continue
        return found

    def time(self) -> float:
        """What the node's clock says."""
        return time.time()

    def free_bytes(self) -> tuple[str, int]:
        """The folder for temporary files, and the room that it has."""
        folder = tempfile.gettempdir()
        return folder, shutil.disk_usage(folder).free

    def sees(self, paths: Sequence[str]) -> list[bool]:
        """Which of the paths exist here."""
        return [os.path.exists(path) for path in paths]  # noqa: PTH110

    def listen(self, address: str) -> int:
        """Takes connections from now on.  Returns the port."""
        server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)

        def accept() -> None:
            while True:
                server.accept()[0].close()

        threading.Thread(target=accept, daemon=True).start()
        return int(server.getsockname()[1])

    def reaches(self, places: Sequence[tuple[str, int]], seconds: float) -> list[str]:
        """What went wrong with a connection to each; empty where nothing did."""
        said = []
        for place in places:
            try:
                socket.create_connection(place, seconds).close()
                said.append("")
            except OSError as error:
                said.append(str(error))
        return said
