# SPDX-License-Identifier: Apache-2.0
"""Tests of untrusted code, which run in a process beyond the code's reach; nothing of whet is imported."""
