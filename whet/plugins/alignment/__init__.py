# SPDX-License-Identifier: Apache-2.0
"""Teachers with other vocabularies than their students, aligned by the bytes of tokens."""
