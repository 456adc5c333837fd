# SPDX-License-Identifier: Apache-2.0
"""Plans the memory, disk and time of a run before it starts."""
