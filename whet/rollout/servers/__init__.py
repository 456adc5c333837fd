# SPDX-License-Identifier: Apache-2.0
"""Rollout engines that sample with a server in a process and an environment of its own: all but the server's words."""
