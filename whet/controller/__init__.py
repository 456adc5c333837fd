# SPDX-License-Identifier: Apache-2.0
"""Workers by role in many processes, and the groups through which one control flow calls them."""
