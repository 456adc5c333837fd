# SPDX-License-Identifier: Apache-2.0
"""`whet view`: a page with curves, trajectories and tokens of runs, read from the files in their folders."""
