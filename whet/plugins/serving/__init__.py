# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server over a rollout engine."""
