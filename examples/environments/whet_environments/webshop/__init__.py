# SPDX-License-Identifier: Apache-2.0
"""A shop in text: search, look at products, choose options, buy."""
