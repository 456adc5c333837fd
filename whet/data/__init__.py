# SPDX-License-Identifier: Apache-2.0
"""Reads data rows, makes prompts and training examples from them, and draws prompts and examples in order."""
