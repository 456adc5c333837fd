# SPDX-License-Identifier: Apache-2.0
"""The loops, and how a config becomes a run."""
