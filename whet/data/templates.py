# SPDX-License-Identifier: Apache-2.0
"""Jinja templates of the user, rendered in jinja's sandbox and within limits of time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from whet.errors import DataError
from whet.limits import bounded, cause


class Template:
    """The template in the config key `key`, or in the `.jinja` file that it names.

    Raises: DataError for a file that is missing or not UTF-8, and for an error in the template."""

    def __init__(self, key: str, text: str) -> None:
        self.key = key
        if text.endswith(".jinja"):
            try:
                text = Path(text).read_text(encoding="utf-8")
            except FileNotFoundError as error:
                raise DataError(f"{key}: no such file: {text}") from error
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{key}: {text} cannot be read: {error}; save it as UTF-8") from error
        try:
            with bounded():  # compiling evaluates constant expressions
                self._compiled = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined).from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{key}: line {error.lineno}: {error.message}") from error
        except Exception as error:  # errors of Python in the code that jinja generates
            raise DataError(f"{key} cannot be compiled: {cause(error)}; write it more simply") from error

    def render(self, fields: Mapping[str, Any]) -> str:
        """Renders the template for the fields of one row.  Raises: DataError, also beyond the limits of
        `whet.limits`."""
        try:
            with bounded():
                return self._compiled.render(fields)
        except jinja2.UndefinedError as error:
            raise DataError(f"{self.key}: {error.message}; the row has {', '.join(fields)}") from error
        except Exception as error:  # a template is other people's code
            raise DataError(f"{self.key} cannot be rendered: {cause(error)}; correct the template") from error
