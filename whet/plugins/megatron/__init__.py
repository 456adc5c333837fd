# SPDX-License-Identifier: Apache-2.0
"""Training with Megatron-Core. It is optional: nothing outside this folder imports it."""
