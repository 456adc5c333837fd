# SPDX-License-Identifier: Apache-2.0
"""How a version of the weights comes from the ranks that train it to those that sample from it."""
