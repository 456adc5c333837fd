# SPDX-License-Identifier: Apache-2.0
"""The version of whet, which its distribution takes from here, and the name of that distribution."""

from __future__ import annotations

DISTRIBUTION = "whet-rl"  # `whet` on PyPI is another project
__version__ = "0.3.0"
