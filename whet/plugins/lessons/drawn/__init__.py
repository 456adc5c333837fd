# SPDX-License-Identifier: Apache-2.0
"""Data sets of pictures and videos that are drawn from a seed, for models that see: entries of `data.train_files` such
as `whet.plugins.lessons.drawn.figures:counting`."""
