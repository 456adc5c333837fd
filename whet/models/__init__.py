# SPDX-License-Identifier: Apache-2.0
"""Language models as whet reads them."""
