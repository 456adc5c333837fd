# SPDX-License-Identifier: Apache-2.0
"""Tests of untrusted code, in a process that the code cannot reach; nothing of whet is imported."""
