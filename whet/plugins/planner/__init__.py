# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: its memory, disk and time."""
