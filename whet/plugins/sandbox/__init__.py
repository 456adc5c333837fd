# SPDX-License-Identifier: Apache-2.0
"""Sandboxes of untrusted programs: `local` on this machine, `http` behind a service, which `server` is; `inside` is the
code that runs inside, of which nothing imports whet."""
