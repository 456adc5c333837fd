# SPDX-License-Identifier: Apache-2.0
"""A tool of your own: whet train ... 'environment.tools=[examples/extending/tool.py:days_between]'

Types and the docstring's `Args:` make the schema that the model reads; parameters after `*` are options that it does
not see."""

from datetime import date


def days_between(first: str, last: str, *, inclusive: bool = False) -> int:
    """Counts the days between two dates.

    Args:
        first: the earlier date, as 2024-02-28
        last: the later date
    """
    return (date.fromisoformat(last) - date.fromisoformat(first)).days + inclusive
