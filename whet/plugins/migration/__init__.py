# SPDX-License-Identifier: Apache-2.0
"""Migration from other systems: `convert` turns their configs and scripts into recipes, `foreign` lists their keys,
`protocol` implements verl's DataProto, and `managers` runs their reward managers."""
