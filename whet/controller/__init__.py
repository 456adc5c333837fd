# SPDX-License-Identifier: Apache-2.0
"""One control flow, many compute processes: workers by role, and the groups through which the loop calls them."""
