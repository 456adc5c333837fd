# SPDX-License-Identifier: Apache-2.0
"""The code shared by rollout engines that sample with a server, in a process and a Python environment of its own."""
