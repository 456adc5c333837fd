# SPDX-License-Identifier: Apache-2.0
"""A stand-in: without num2words transformers makes no SmolVLM processor, and whet itself writes texts of videos."""


def num2words(number: int) -> str:
    """The number in digits."""
    return str(number)
