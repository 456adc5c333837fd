# SPDX-License-Identifier: Apache-2.0
"""Sampling of responses: engines, episodes, groups and the batch that they become."""
