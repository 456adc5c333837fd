# SPDX-License-Identifier: Apache-2.0
"""What a run does without: a folder each, which can be deleted, with a manifest of its names (`whet/manifests.py`)."""
