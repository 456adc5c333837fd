# SPDX-License-Identifier: Apache-2.0
"""Trackers of metrics: the console, a JSONL file, services such as TensorBoard; and learning curves."""

from whet.tracking.console import ConsoleTracker
from whet.tracking.jsonl import JsonlTracker, cut_back, read_records
from whet.tracking.tracker import Tracker, Trackers

__all__ = ["ConsoleTracker", "JsonlTracker", "Tracker", "Trackers", "cut_back", "read_records"]
