# SPDX-License-Identifier: Apache-2.0
"""The version of whet, which the distribution reads from this file, and the distribution's name."""

from __future__ import annotations

DISTRIBUTION = "whet-rl"  # `whet` on PyPI is another project
__version__ = "0.3.0"
