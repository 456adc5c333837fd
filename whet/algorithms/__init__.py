# SPDX-License-Identifier: Apache-2.0
"""The mathematics of algorithms: functions from tensors to tensors.

A function is chosen by its registered name (`whet.registry`). To add one, write it in the file of its kind, with the
kind's decorator and literal option defaults.
"""
