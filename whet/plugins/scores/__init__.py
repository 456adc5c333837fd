# SPDX-License-Identifier: Apache-2.0
"""Score functions for code, instructions, pictures and short answers, or by a judge; a check of score functions."""
