# SPDX-License-Identifier: Apache-2.0
"""The version of whet, which its distribution takes from here."""

from __future__ import annotations

__version__ = "0.1.0"
