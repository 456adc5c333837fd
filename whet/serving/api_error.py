# SPDX-License-Identifier: Apache-2.0
"""Errors as the OpenAI API has them."""

from __future__ import annotations

from typing import Any

TYPES = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error", 504: "timeout_error"}


class ApiError(Exception):
    """An error for the client: HTTP status, message, the parameter at fault, and a code for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_dict(self) -> dict[str, Any]:
        """The body of the response."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unsupported(param: str, value: object, why: str) -> ApiError:
    """The error for a parameter of the API, or a value, that this server cannot follow."""
    return ApiError(400, f"{param}={value!r} is not supported: {why}", param=param, code="unsupported_value")
