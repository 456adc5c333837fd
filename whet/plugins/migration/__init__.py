# SPDX-License-Identifier: Apache-2.0
"""Migration from other frameworks, such as verl and TRL: `convert` turns configs and scripts into recipes, `foreign`
lists keys, `protocol` implements verl's DataProto, and `managers` runs reward managers."""
