# SPDX-License-Identifier: Apache-2.0
"""The rollout engine that samples with vLLM, in a server with its own process and Python environment."""
