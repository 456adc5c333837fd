# SPDX-License-Identifier: Apache-2.0
"""Sets that `datasets` reads: folders, saved sets, and what an earlier fetch has kept. No network is used."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from whet.data import sources
from whet.data.sources import read_hub
from whet.errors import DataError, DeadlineError

TRAIN, TEST = [{"q": "1+1", "a": "2"}, {"q": "1+2", "a": None}], [{"q": "2+2", "a": "4"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder laid out as on the hub, with `datasets` keeping its files in `tmp_path` and never asking the network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "kept")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    data = tmp_path / "additions" / "data"
    data.mkdir(parents=True)
    datasets.Dataset.from_list(TRAIN).to_parquet(data / "train-00000-of-00001.parquet")
    datasets.Dataset.from_list(TEST).to_parquet(data / "test-00000-of-00001.parquet")
    return data.parent


def read(path: object, config: str | None = None, split: str | None = None, default: str | None = "train") -> object:
    return read_hub(str(path), config, split, default_split=default, deadline_seconds=60.0)


def test_a_folder_is_read_by_split(folder: Path) -> None:
    assert read(folder) == TRAIN
    assert read(folder, split="test") == TEST
    assert read(folder, split="train[:1]") == TRAIN[:1]
    with pytest.raises(DataError, match=r"additions has 2 splits; it has train, test: write .*additions@train for one"):
        read(folder, default=None)
    with pytest.raises(
        DataError, match=r"additions@dev cannot be read: Unknown split \"dev\".*write .*additions@SPLIT"
    ):
        read(folder, split="dev")
    with pytest.raises(DataError, match=r"additions:main cannot be read: .*Available.*write .*additions:CONFIG"):
        read(folder, config="main")


def test_what_save_to_disk_wrote_is_read(folder: Path, tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(TRAIN), "val": datasets.Dataset.from_list(TEST)})
    both.save_to_disk(tmp_path / "both")
    both["val"].save_to_disk(tmp_path / "one")
    assert (read(tmp_path / "both"), read(tmp_path / "both", split="val")) == (TRAIN, TEST)
    assert read(tmp_path / "one", default=None) == TEST
    with pytest.raises(DataError, match=r"both has no split 'test'; it has train, val: write"):
        read(tmp_path / "both", split="test")
    with pytest.raises(DataError, match=r"one has a single split without a name; remove @val"):
        read(tmp_path / "one", split="val")


def test_a_set_that_was_fetched_before_is_read_without_network(folder: Path, tmp_path: Path) -> None:
    read(folder)
    kept = next((tmp_path / "kept").glob("additions/default*/0.0.0/*/dataset_info.json")).parent
    shutil.copytree(kept, tmp_path / "kept" / "owner___additions" / "default" / "0.0.0" / "hash")
    assert read("owner/additions") == TRAIN
    assert read("owner/additions", split="test") == TEST


def test_without_network_the_error_says_what_to_do(folder: Path) -> None:
    with pytest.raises(DataError, match=r"owner/unknown@train cannot be fetched .*; there is no network, .*HF_HUB_OFF"):
        read("owner/unknown", split="train")


def test_what_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_read_datasets", lambda *arguments: time.sleep(5))
    start = time.monotonic()
    with pytest.raises(
        DeadlineError, match=r"owner/slow was not downloaded within data.hub_deadline_seconds=0.05; raise it"
    ):
        read_hub("owner/slow", None, None, default_split=None, deadline_seconds=0.05)
    assert time.monotonic() - start < 4.5  # not the five seconds that it sleeps
