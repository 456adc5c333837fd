# SPDX-License-Identifier: Apache-2.0
"""The rollout engine that samples with vLLM, from a server in a process and an environment of its own."""
