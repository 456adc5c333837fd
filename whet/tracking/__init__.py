# SPDX-License-Identifier: Apache-2.0
"""Trackers of metrics: the console, a JSONL file, services such as TensorBoard; and learning curves."""
