# SPDX-License-Identifier: Apache-2.0
"""Sandboxes for untrusted programs: `local` runs them on this machine, `http` sends them to a service, and `server` is
such a service; `inside` is code that runs in the sandbox and imports nothing of whet."""
