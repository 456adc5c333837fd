# SPDX-License-Identifier: Apache-2.0
"""Sampling of responses."""
