# SPDX-License-Identifier: Apache-2.0
"""Tools: functions, classes and MCP servers that the model calls between its turns."""
