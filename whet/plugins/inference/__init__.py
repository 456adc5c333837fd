# SPDX-License-Identifier: Apache-2.0
"""Rollouts by vLLM and SGLang."""
