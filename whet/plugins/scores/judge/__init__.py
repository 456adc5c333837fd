# SPDX-License-Identifier: Apache-2.0
"""Language models that score: the client of their endpoint, rubrics, and the score function."""
