# SPDX-License-Identifier: Apache-2.0
"""A stand-in for num2words, without which transformers builds no SmolVLM processor; whet itself writes texts of
videos."""


def num2words(number: int) -> str:
    """The number in digits."""
    return str(number)
