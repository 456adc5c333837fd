# SPDX-License-Identifier: Apache-2.0
"""First steps: quickstarts, newly initialised models, drawn pictures."""
