# SPDX-License-Identifier: Apache-2.0
"""Evaluation of models: sampling, scoring, estimates with intervals, and comparisons."""
