# SPDX-License-Identifier: Apache-2.0
"""Memory, disk and time of a run, before it starts."""
