# SPDX-License-Identifier: Apache-2.0
"""Models that see: how each family reads images and videos, and the features of its vision tower."""
