# SPDX-License-Identifier: Apache-2.0
"""whet's own rollout engine."""
