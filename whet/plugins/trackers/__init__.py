# SPDX-License-Identifier: Apache-2.0
"""Trackers that are services, one file each."""
