# SPDX-License-Identifier: Apache-2.0
"""First steps: quickstarts, models from nothing, drawn pictures."""
