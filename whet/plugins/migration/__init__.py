# SPDX-License-Identifier: Apache-2.0
"""Ways here from other systems: `convert` makes recipes of their configs and scripts, `foreign` knows their keys,
`protocol` has verl's DataProto, `managers` makes their reward managers."""
