# SPDX-License-Identifier: Apache-2.0
"""`whet view`: a page with the curves, trajectories and tokens of runs, from the files in their folders."""
