# SPDX-License-Identifier: Apache-2.0
"""Encoders of models with vision: how each family reads images and videos, and the features that its tower computes."""
