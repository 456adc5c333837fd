# SPDX-License-Identifier: Apache-2.0
"""Programs that run in separate processes, one a competitor. The files that begin with `trl_` know nothing of whet."""
