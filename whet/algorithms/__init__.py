# SPDX-License-Identifier: Apache-2.0
"""The mathematics of algorithms: functions from tensors to tensors.

A config chooses a function by its registered name (`whet.registry`). To add a function, write it in the file of its
kind, with the kind's decorator and literal defaults of options."""
