# SPDX-License-Identifier: Apache-2.0
"""Tools for an environment, shipped environments, and a check of environments."""
