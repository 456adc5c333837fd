# SPDX-License-Identifier: Apache-2.0
"""What runs in a process of its own, one a competitor. The files that begin with `trl_` know nothing of whet."""
