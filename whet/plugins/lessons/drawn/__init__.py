# SPDX-License-Identifier: Apache-2.0
"""Data sets of pictures and videos drawn from a seed, for vision models. They are entries of `data.train_files`, such
as `whet.plugins.lessons.drawn.figures:counting`."""
