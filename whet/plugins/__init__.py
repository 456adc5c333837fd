# SPDX-License-Identifier: Apache-2.0
"""Plugins: optional parts, a folder each, with a manifest of the names that they add (`whet/manifests.py`)."""
