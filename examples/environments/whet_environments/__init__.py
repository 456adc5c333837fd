# SPDX-License-Identifier: Apache-2.0
"""Games in text: environments of whet in pure Python, whose draws depend on the seed of the episode alone."""
