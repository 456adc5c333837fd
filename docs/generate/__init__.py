# SPDX-License-Identifier: Apache-2.0
"""Writes the pages that are made from code: `make pages`."""
