# SPDX-License-Identifier: Apache-2.0
"""EleutherAI's lm-eval on whet's engines."""
