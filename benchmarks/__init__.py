# SPDX-License-Identifier: Apache-2.0
"""whet measured against transformers, against TRL and against the machine: `make bench`."""
