# SPDX-License-Identifier: Apache-2.0
"""Training by Megatron-Core. Optional: nothing outside this folder imports it."""
