# SPDX-License-Identifier: Apache-2.0
"""Places that metrics go to: the console, a JSONL file, a learning curve, a service with a library of its own."""

from whet.tracking.console import ConsoleTracker
from whet.tracking.jsonl import JsonlTracker, cut_back, read_records
from whet.tracking.tracker import Tracker, Trackers

__all__ = ["ConsoleTracker", "JsonlTracker", "Tracker", "Trackers", "cut_back", "read_records"]
