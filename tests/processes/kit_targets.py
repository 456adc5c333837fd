# SPDX-License-Identifier: Apache-2.0
"""Targets of the tests of the process kit."""

import os
import pickle
import signal
import time

from whet.processes.template import Caller, Serve

loaded_in = os.getpid()


def prepare(argument: bytes) -> Serve:
    """Children that carry out each message, and answer with a text."""

    def serve(caller: Caller) -> None:
        while True:
            number, content = caller.receive()
            verb, _, rest = content.decode().partition(" ")
            if verb == "sleep":
                time.sleep(float(rest))
            if verb == "kill":
                os.kill(int(rest) or os.getpid(), signal.SIGKILL)
            if verb == "exit":
                os._exit(int(rest))
            if verb == "number":
                number = int(rest)
            said = {"argument": argument.decode(), "pid": str(os.getpid()), "parent": str(os.getppid())}
            said |= {
                "template": str(loaded_in),
                "group": str(os.getpgid(0)),
                "big": "x" * 10**6,
                "length": str(len(rest)),
            }
            answer = said.get(verb, verb)
            caller.send(number, rest.encode() if verb == "raw" else pickle.dumps(answer if verb != "bytes" else b"x"))

    return serve


def broken(argument: bytes) -> Serve:
    """A target that cannot be loaded."""
    os._exit(9)
