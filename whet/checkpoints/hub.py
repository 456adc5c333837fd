# SPDX-License-Identifier: Apache-2.0
"""Uploads of exported models and checkpoints to the hub (environment variables HF_ENDPOINT and HF_TOKEN)."""

from __future__ import annotations

import logging
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, constants

from whet.checkpoints.export import export
from whet.errors import CheckpointError, WhetError
from whet.processes.background import Background

log = logging.getLogger(__name__)
CLOSE_SECONDS = 1800.0  # longest wait for uploads at the end of a run


def address(repo: str) -> str:
    """Returns the address of a repository's web page."""
    return f"{constants.ENDPOINT}/{repo}"


def upload(folder: Path, repo: str, *, path: str | None = None, private: bool = False) -> None:
    """Uploads a folder to `path` in a repository (owner/name), which is created if it is missing.

    Raises: CheckpointError with the hub's answer."""
    api = HfApi(library_name="whet")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, path_in_repo=path, commit_message=f"Upload {folder.name}")
    except Exception as error:  # the hub's client and its libraries raise many types of errors
        reason = " ".join(str(error).split())
        found = f"was not uploaded to {address(repo)}: {reason}"
        change = f"check the name and HF_TOKEN, then upload it with `hf upload {repo} {folder}`"
        raise CheckpointError(f"{folder}", found, "", change) from error


class Uploads:
    """Uploads checkpoints of a run while it trains, one at a time, and at the end the exported model. A failed upload
    is logged and does not end the run.

    Waits: in `close`, CLOSE_SECONDS at most.
    """

    def __init__(self, repo: str) -> None:
        self._repo = repo
        self._thread = Background("whet-hub")
        self._running: list[Future[None]] = []

    def checkpoint(self, folder: Path) -> None:
        """Uploads a checkpoint to checkpoints/global_step_N."""
        self._running.append(self._thread.submit(partial(self._guarded, folder, f"checkpoints/{folder.name}")))

    def model(self, folder: Path, *, trust_remote_code: bool) -> None:
        """Exports the model of a checkpoint, and uploads it to the root folder of the repository."""

        def exported() -> None:
            with TemporaryDirectory(prefix="whet-hub-") as scratch:
                try:
                    out = export(folder, Path(scratch) / "model", trust_remote_code=trust_remote_code)
                except WhetError as error:
                    log.warning("the model is not uploaded: %s", error)
                    return
                self._guarded(out, None)

        self._running.append(self._thread.submit(exported))

    def close(self) -> None:
        """Waits for the remaining uploads."""
        _, late = wait(self._running, CLOSE_SECONDS)
        if late:
            log.warning("%d uploads to %s are given up after %.0f s", len(late), address(self._repo), CLOSE_SECONDS)
        for upload in late:
            upload.cancel()
        self._thread.close()

    def _guarded(self, folder: Path, path: str | None) -> None:
        try:
            upload(folder, self._repo, path=path, private=True)
        except CheckpointError as error:
            log.warning("%s", error)
        else:
            log.info("uploaded %s to %s", path or "the model", address(self._repo))
