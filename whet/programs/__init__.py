# SPDX-License-Identifier: Apache-2.0
"""Untrusted programs: the contract of sandboxes (`protocol`), which plugins and packages register, and the tests of
untrusted code (`inside`), which run in a process beyond the code's reach. Nothing in `inside` imports whet."""
