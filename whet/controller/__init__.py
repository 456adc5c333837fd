# SPDX-License-Identifier: Apache-2.0
"""Workers, which run a role in many processes, and worker groups, through which one program calls them."""
