# SPDX-License-Identifier: Apache-2.0
"""Workers of the roles that a run launches."""
