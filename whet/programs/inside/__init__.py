# SPDX-License-Identifier: Apache-2.0
"""Tests of untrusted code. They run in a process beyond the code's reach, and import nothing of whet."""
