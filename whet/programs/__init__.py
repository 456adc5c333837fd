# SPDX-License-Identifier: Apache-2.0
"""Untrusted programs: the contract of sandboxes (`protocol`), which plugins and packages register, and the runner of
tests of untrusted code (`inside`), in a process that the code cannot access. Nothing in `inside` imports whet."""
