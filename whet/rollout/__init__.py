# SPDX-License-Identifier: Apache-2.0
"""How answers are sampled."""
