# SPDX-License-Identifier: Apache-2.0
"""The unfinished requests of an engine, and the rules that hold for requests of all engines."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from whet.errors import EngineError, WeightSyncError
from whet.kernels.sampling import check_rules
from whet.rollout.protocol import Failed, Request, Status
from whet.types import Failure

MAX_UNFINISHED = 65536  # requests; further ones are refused until some finish


L = TypeVar("L", bound=Any)  # with a `request` and its time `submitted_at`


class Ledger(dict[str, L]):
    """Unfinished requests by uid, the oldest first."""

    def answer(self, request: Request) -> bool | None:
        """Returns the result of `submit` if the engine has nothing to do: True if this attempt or a later one is
        unfinished, False if MAX_UNFINISHED requests are unfinished. Otherwise None."""
        if (earlier := self.get(request.uid)) is not None:
            return True if request.attempt <= earlier.request.attempt else None
        return None if len(self) < MAX_UNFINISHED else False

    def status(self, version: int, running: int) -> Status:
        """Returns the status of an engine with these requests."""
        unfinished = list(self.values())  # a copy, because another thread may submit
        oldest = next(iter(unfinished), None)
        return Status(
            version=version,
            running=running,
            waiting=len(unfinished) - running,
            oldest=None if oldest is None else oldest.request.uid,
            oldest_seconds=0.0 if oldest is None else time.monotonic() - oldest.submitted_at,
        )


def check_request(request: Request, vocab_size: int) -> None:
    """Checks a request against limits of all engines.  Raises: EngineError if no engine can sample it."""
    params = request.params
    if not request.prompt_ids or params.max_new_tokens <= len(request.sampled_ids):
        found = f"{len(request.prompt_ids)} prompt tokens, {len(request.sampled_ids)} tokens sampled earlier and "
        found += f"max_new_tokens={params.max_new_tokens}"
        raise EngineError(f"request {request.uid}", found, "a prompt token, and a max_new_tokens above that number")
    if params.allowed_token_ids is not None or params.bad_words:
        check_rules((params.allowed_token_ids, params.bad_words), vocab_size)


def too_long(request: Request, most: str, option: str) -> EngineError:
    """Returns the error for a request that may need more tokens than `most`, as an engine's `option` allows."""
    found = f"may need {len(request.prompt_ids) + request.params.max_new_tokens} tokens"
    change = f"raise rollout.engine.options.{option} or lower data.max_response_length"
    error = EngineError(f"request {request.uid}", found, f"at most {most}", change)
    error.option = option
    return error


def check_whole(coming: int | None, version: int) -> None:
    """Checks that the weights are not a mix of two versions.  Raises: WeightSyncError if `coming` is not None."""
    if coming is not None:
        found = f"did not arrive completely, and may be mixed with version {version}"
        raise WeightSyncError(f"version {coming} of the weights", found, change="send all weights of a version")


def too_late(request: Request, after: str = "") -> Failed:
    """Returns the event for a request whose deadline has passed."""
    why = f"its deadline of {request.deadline_seconds:g} s was over{after}"
    return Failed(request.uid, request.attempt, Failure("engine", why, timed_out=True))
