# SPDX-License-Identifier: Apache-2.0
"""Training loops, and the construction of a run from its config."""
