# SPDX-License-Identifier: Apache-2.0
"""Measurements of how good a model is."""
