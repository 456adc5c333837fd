# SPDX-License-Identifier: Apache-2.0
"""Stands in for num2words, which transformers needs to build a SmolVLM processor. Whet writes the texts of videos
itself."""


def num2words(number: int) -> str:
    """Returns the number in digits."""
    return str(number)
