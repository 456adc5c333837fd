# SPDX-License-Identifier: Apache-2.0
"""The pages written by `make pages` agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import __main__ as generate, algorithms, columns, fits, gpu, layers, migrating, models
from docs.generate.config import MARK, page, reference
from tests.models import nano
from tests.parsed import uncollected
from whet.columns import TABLE
from whet.config.schema import EngineConfig, TrainConfig
from whet.config.section import leaf_fields
from whet.models.supported import Support
from whet.plugins.proofs.command import certify_all

DOCS = Path(__file__).parents[2] / "docs"
CERTIFICATES = DOCS.parent / "whet" / "algorithms" / "certificates.csv"
ADVICE = "the page is not what the code says; write it with `make pages`"


@pytest.fixture
def written() -> str:
    return (DOCS / "algorithms.md").read_text(encoding="utf-8")


@pytest.mark.shipped
def test_the_page_is_current_and_has_the_shipped_certificates(written: str) -> None:
    assert written == generate.PAGES["algorithms"](written), ADVICE


@pytest.mark.slow
def test_the_certificates_are_current() -> None:
    assert CERTIFICATES.read_text(encoding="utf-8") == algorithms.file(certify_all()), ADVICE


def test_the_page_of_models_is_current_and_says_that_most_kinds_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 40 kinds that tests/models/test_nano_*.py train by the way of their row. Two rows are computed here, the
    others by the slow test."""
    written, told, support_at = (DOCS / "models.md").read_text(encoding="utf-8"), nano.ways(), models.support_at
    own, general = Support(), {name: Support(lacks) for name, (way, lacks) in told.items() if way == "general"}
    monkeypatch.setattr(models, "support_at", lambda name: general.get(name, own))
    assert written == models.page(written), ADVICE
    assert all(support_at(name).lacks == told[name][1] for name in ("llama", "mamba2"))
    found = [way for way, _ in told.values()]
    assert told.keys() == nano.NANO.keys() == nano.DENSE.keys() | nano.WITH_EXPERTS.keys() | nano.WITH_STATES.keys()
    assert len(found) - found.count("refused") >= 34 and found.count("own") >= 16 and len(found) == 40


@pytest.mark.slow
def test_every_row_of_the_page_of_models_is_current() -> None:
    written = (DOCS / "models.md").read_text(encoding="utf-8")
    assert written == models.page(written), ADVICE


def test_the_page_of_keys_is_current() -> None:
    assert (DOCS / "config.md").read_text().partition(MARK)[2] == reference(), ADVICE


def test_every_key_has_its_row() -> None:
    train = reference().partition("## `whet distill`")[0]
    rows = [line for line in train.splitlines() if line.startswith("| `")]
    told = {row.split("`")[1] for row in rows}
    assert told == {key.rpartition(".")[2] for key in leaf_fields(TrainConfig)}
    again = 3 * len(EngineConfig.model_fields)  # the engines of critic, ref and reward_model are told as the actor's
    assert len(rows) == len(leaf_fields(TrainConfig)) - again
    assert "| `n` | a whole number > 0 | `8` | responses a prompt |" in rows
    assert "The keys and defaults of `actor.engine` of `whet train`." in train
    assert "runs/&lt;project_name&gt;/&lt;experiment_name&gt;" in train


def test_what_stands_above_the_mark_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    file = tmp_path / "config.md"
    file.write_text(f"# Mine\n{MARK}old")
    generate.main(["config"])
    assert file.read_text() == page(f"# Mine\n{MARK}") == f"# Mine\n{MARK}{reference()}"


def test_the_page_of_foreign_keys_has_the_tables_that_errors_are_answered_from() -> None:
    written = (DOCS / "migrating.md").read_text()
    assert migrating.page(written) == written, ADVICE
    assert migrating.page("## From ROLL\n\nkeys:\n\n| old |\n\nend\n").count("| `max_steps`") == 1


def test_the_page_of_columns_is_current_and_has_every_column() -> None:
    assert (DOCS / "columns.md").read_text() == columns.page(""), ADVICE
    assert all(columns.page("").count(f"\n| `{column.name}` |") == 1 for column in TABLE)


def test_the_picture_of_the_layers_shows_the_imports() -> None:
    with uncollected():
        drawn, made = ((DOCS / "layers.svg").read_text(), layers.picture(layers.PAGE.read_text()))
    facts = re.compile(r"<title>(\w+): [\d,]+ lines; imports (.*)</title>")
    assert facts.findall(drawn) == facts.findall(made), "`make pages` draws it anew"
    assert len(facts.findall(made)) == made.count("<g>") > 30
    assert ("types", "nothing") in facts.findall(made)


def test_the_page_of_what_fits_is_current_but_for_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = fits.read((DOCS / "fits.md").read_text())
    columns = list(fits.COLUMNS.values())
    monkeypatch.setattr(fits, "cell", lambda size, changes, card: tables[str(card)][size][columns.index(changes)])
    monkeypatch.setattr(fits, "on_host", lambda size: tables["host"][size][0])
    monkeypatch.setattr(fits, "measured", lambda work: tables["measured"][work])
    assert (DOCS / "fits.md").read_text() == fits.page(), "write it with `python -m docs.generate.fits`"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a plan takes a minute on busy cores
def test_a_column_of_what_fits_is_what_is_planned() -> None:
    """The tables have all weights on one accelerator, the smallest size and the largest that fits; and measurements on
    cards."""
    tables = fits.read((DOCS / "fits.md").read_text())
    for card, size in ((24, "0.6B"), (80, "0.6B"), (141, "8B"), (80, "8B")):
        assert fits.cell(size, {}, card) == tables[str(card)][size][0], (card, size)
    assert tables["80"]["8B"][0] == "-" and tables["measured"] == {work: fits.measured(work) for work in fits.MEASURED}


@pytest.mark.parametrize("name", ["gpu.md", *gpu.STATED])
def test_what_pages_say_of_gpus_is_of_the_file_of_figures(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    shown = gpu.page if name == "gpu.md" else gpu.stated(name)
    assert shown(written) == written, ADVICE
    assert name == "gpu.md" or gpu.sentence(gpu.records(), name) in written
    links = re.findall(r"\(((?:\.\./|docs/)?gpu\.md)\)", gpu.sentence(gpu.records(), name))
    assert [(DOCS / name).parent.joinpath(link).resolve() for link in links] == [DOCS / "gpu.md"]


def test_the_sentence_is_of_a_card_with_both_figures() -> None:
    found = [
        {"part": "sample:0.5b", "card": "NVIDIA X1", "tokens_per_second": 9e5},
        {"part": "sample:0.5b", "card": "NVIDIA Y2 80GB", "tokens_per_second": 51_499.0},
        {"part": "update:0.5b", "card": "NVIDIA Y2 80GB", "mfu": 0.256},
    ]
    said = gpu.sentence(found, "index.md")
    assert "51,000 tokens/s" in said and "26 %" in said and "Y2" in said and "X1" not in said
