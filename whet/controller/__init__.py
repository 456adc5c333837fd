# SPDX-License-Identifier: Apache-2.0
"""Workers of each role in many processes, and the groups through which one program calls them."""
