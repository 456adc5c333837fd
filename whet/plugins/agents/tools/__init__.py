# SPDX-License-Identifier: Apache-2.0
"""Tools that the model calls between its turns: functions, classes and MCP servers."""
