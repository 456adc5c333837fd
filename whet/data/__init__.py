# SPDX-License-Identifier: Apache-2.0
"""Reads data rows, makes prompts and SFT examples from them, and draws these in order."""
