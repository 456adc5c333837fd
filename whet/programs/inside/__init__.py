# SPDX-License-Identifier: Apache-2.0
"""Runs tests of untrusted code inside a sandbox, in a process that the code cannot access; imports nothing of whet."""
