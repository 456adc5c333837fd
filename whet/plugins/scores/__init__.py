# SPDX-License-Identifier: Apache-2.0
"""Score functions for code, instructions, pictures and short answers, and by judges; and a check of score functions."""
