# SPDX-License-Identifier: Apache-2.0
"""Runs EleutherAI's lm-eval on whet's engines."""
