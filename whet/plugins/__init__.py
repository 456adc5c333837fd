# SPDX-License-Identifier: Apache-2.0
"""Plugins: parts that a run does without, a folder each, with a manifest of its names (`whet/manifests.py`)."""
