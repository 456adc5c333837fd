# SPDX-License-Identifier: Apache-2.0
"""Start-up of every Python process of a server: each ends when the process that started it is gone.

vLLM's engine process does not hear that its parent was killed. Python imports this file by its name, as its folder is
on the server's PYTHONPATH."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1

ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
