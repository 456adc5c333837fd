# SPDX-License-Identifier: Apache-2.0
"""Weight sync: sends a version of the weights from the ranks that train it to the ranks that sample from it."""
