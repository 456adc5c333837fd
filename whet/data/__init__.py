# SPDX-License-Identifier: Apache-2.0
"""Data: prompts, templates, supervised examples, the loader."""
