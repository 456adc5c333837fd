# SPDX-License-Identifier: Apache-2.0
"""Data: reads rows, makes prompts and SFT examples, draws them in order."""
