# SPDX-License-Identifier: Apache-2.0
"""How good a model is."""
