# SPDX-License-Identifier: Apache-2.0
"""Trackers that send metrics to services; each has its own file."""
