# SPDX-License-Identifier: Apache-2.0
"""The pages, and in `generate` the code that writes some of them. Not part of the wheel."""
