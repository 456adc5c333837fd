# SPDX-License-Identifier: Apache-2.0
"""Data sets read by `datasets`: folders, saved sets, and the cache of an earlier download. No network is used."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from tests.raising import raises
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
    two = {"found": re.compile(" 2 "), "expected": re.compile("train, test"), "change": re.compile("additions@train")}
    with raises(DataError, re.compile("additions$"), **two):
        read(folder, default=None)
    change = re.compile("additions@SPLIT")
    with raises(DataError, re.compile("additions@dev$"), found=re.compile('Unknown split "dev"'), change=change):
        read(folder, split="dev")
    change = re.compile("additions:CONFIG")
    with raises(DataError, re.compile("additions:main$"), found=re.compile("Available"), change=change):
        read(folder, config="main")


def test_what_save_to_disk_wrote_is_read(folder: Path, tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(TRAIN), "val": datasets.Dataset.from_list(TEST)})
    both.save_to_disk(tmp_path / "both")
    both["val"].save_to_disk(tmp_path / "one")
    assert (read(tmp_path / "both"), read(tmp_path / "both", split="val")) == (TRAIN, TEST)
    assert read(tmp_path / "one", default=None) == TEST
    with raises(DataError, re.compile("both$"), found=re.compile("'test'"), expected=re.compile("train, val")):
        read(tmp_path / "both", split="test")
    with raises(DataError, re.compile("one$"), change=re.compile("@val$")):
        read(tmp_path / "one", split="val")


def test_a_set_that_was_fetched_before_is_read_without_network(folder: Path, tmp_path: Path) -> None:
    read(folder)
    kept = next((tmp_path / "kept").glob("additions/default*/0.0.0/*/dataset_info.json")).parent
    shutil.copytree(kept, tmp_path / "kept" / "owner___additions" / "default" / "0.0.0" / "hash")
    assert read("owner/additions") == TRAIN
    assert read("owner/additions", split="test") == TEST


def test_without_network_the_error_says_what_to_do(folder: Path) -> None:
    with raises(DataError, key="owner/unknown@train", change=re.compile("HF_HUB_OFFLINE=1")):
        read("owner/unknown", split="train")


def test_what_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_read_datasets", lambda *arguments: time.sleep(5))
    start = time.monotonic()
    found = re.compile(r"data\.hub_deadline_seconds=0\.05")
    with raises(DeadlineError, key="owner/slow", found=found, change=re.compile("HF_HUB_OFFLINE=1")):
        read_hub("owner/slow", None, None, default_split=None, deadline_seconds=0.05)
    assert time.monotonic() - start < 4.5  # not the five seconds that it sleeps
