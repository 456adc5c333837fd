# SPDX-License-Identifier: Apache-2.0
"""Language models: loading, forward passes on packed rows, token statistics, adapters."""
