# SPDX-License-Identifier: Apache-2.0
"""Tools around an environment, environments that ship, and the check of an environment."""
