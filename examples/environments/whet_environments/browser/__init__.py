# SPDX-License-Identifier: Apache-2.0
"""Web pages in Chromium as an environment."""
