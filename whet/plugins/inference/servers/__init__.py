# SPDX-License-Identifier: Apache-2.0
"""The code shared by rollout engines that sample with a server, in a separate process and Python environment."""
