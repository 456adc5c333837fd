# SPDX-License-Identifier: Apache-2.0
"""The way of a version of the weights from the ranks that train it to those that sample from it."""
