# SPDX-License-Identifier: Apache-2.0
"""Expected errors, by their fields: the words of a message may change, its facts may not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from whet.errors import WhetError


@contextmanager
def raises(kind: type[WhetError], key: str | re.Pattern[str] | None = None, **fields: object) -> Iterator[None]:
    """Expects an error of a kind with a key, and with the other fields that are named (found, expected, change)."""
    with pytest.raises(kind) as caught:
        yield
    check_fields(caught.value, key, **fields)


def check_fields(error: WhetError, key: str | re.Pattern[str] | None = None, **fields: object) -> None:
    """Compares fields of an error: with a value by equality, with a pattern by a search in the field's text."""
    for name, value in {**({} if key is None else {"key": key}), **fields}.items():
        found = getattr(error, name)
        is_right = bool(value.search(str(found))) if isinstance(value, re.Pattern) else found == value
        assert is_right, f"{name} is {found!r}, not {value!r}; the error is {error!r}"
    assert str(error), "an error has words"
