# SPDX-License-Identifier: Apache-2.0
"""Sandboxes for untrusted programs: `local` runs them on this machine, `http` asks a service, and `server` is this
service; `inside` is code that runs in the sandbox and imports nothing of whet."""
