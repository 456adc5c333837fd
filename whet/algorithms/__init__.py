# SPDX-License-Identifier: Apache-2.0
"""The mathematics of algorithms: functions from tensors to tensors.

A config chooses a function by its registered name (`whet.registry`). To add a function, write it in the file of its
kind, register it with the decorator of the kind, and give each of its options a literal as default."""
