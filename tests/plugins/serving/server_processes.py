# SPDX-License-Identifier: Apache-2.0
"""Servers in processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

ECHO = f"{Path(__file__).with_name('echo_engine.py')}:EchoEngine"
Start = Callable[..., "Running"]


class Running:
    """A server, its address, and its output."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[str]()
        self.address = self.wait_for(r"on (http://\S+)/v1")[1]

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The next line that it prints with the pattern."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"the server ended: {''.join(self.lines)}")

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, without repetitions."""
        return openai.OpenAI(**{"base_url": f"{self.address}/v1", "api_key": "any", "max_retries": 0, **options})

    def http(self) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.address, timeout=60)

    def ended(self) -> tuple[int, str]:
        """Waits for its end.  Returns the exit status, and all that it printed."""
        rest, _ = self.process.communicate(timeout=60)
        return self.process.returncode, "".join(self.lines) + rest


@contextmanager
def started(*arguments: object) -> Iterator[Running]:
    """`whet serve` on a free port."""
    words = [sys.executable, "-m", "whet", "serve", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield Running(process)
        finally:
            process.kill()
