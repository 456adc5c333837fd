# SPDX-License-Identifier: Apache-2.0
"""Encoders of models with vision: each family's way of reading images and videos, and the features of its tower."""
