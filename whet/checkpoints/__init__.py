# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run, and models exported from them."""
