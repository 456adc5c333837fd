# SPDX-License-Identifier: Apache-2.0
"""The mathematics: tensors in, tensors out.

A function is found by its registered name (`whet.registry`); to add one is to write it in the file of its kind, under
the kind's decorator, with literal option defaults.
"""
