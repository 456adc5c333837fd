# SPDX-License-Identifier: Apache-2.0
"""`whet plot`: metrics of runs as figures and PNG files."""
