# SPDX-License-Identifier: Apache-2.0
"""Sandboxes of untrusted programs: `local` on this machine, `http` behind a service, implemented by `server`; `inside`
is the code that runs in the sandbox and imports nothing of whet."""
