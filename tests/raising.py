# SPDX-License-Identifier: Apache-2.0
"""Expected errors, by their fields: the words of a message may change, its facts may not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from whet.errors import WhetError

ErrorT = TypeVar("ErrorT", bound=WhetError)


@contextmanager
def raises(
    kind: type[ErrorT], key: str | re.Pattern[str] | None = None, **fields: object
) -> Iterator[pytest.ExceptionInfo[ErrorT]]:
    """Expects an error of a kind with a key, and with the other fields that are named (found, expected, change)."""
    with pytest.raises(kind) as caught:
        yield caught
    check_fields(caught.value, key, **fields)


def check_fields(error: WhetError, key: str | re.Pattern[str] | None = None, **fields: object) -> None:
    """Compares fields of an error, or of one that is joined to it: with a value by equality, with a pattern by a search
    in the field's text."""
    wanted, each = {**({} if key is None else {"key": key}), **fields}, [error, *error.others]
    is_right = any(all(_agrees(getattr(one, name), value) for name, value in wanted.items()) for one in each)
    assert is_right, f"no error with {wanted} in {each}"
    assert str(error), "an error has words"


def _agrees(found: object, wanted: object) -> bool:
    return bool(wanted.search(str(found))) if isinstance(wanted, re.Pattern) else found == wanted
