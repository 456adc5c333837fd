# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from whet.cli.app import main
from whet.config.schema import DataConfig
from whet.data.load import load_items
from whet.models.load import load_tokenizer
from whet.plugins.lessons.init_model import init_model


@pytest.fixture
def arguments(qwen25_folder: Path, tmp_path: Path) -> list[str]:
    """The model, and a file whose second row is long."""
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "12" * 60, "answer": "x" * 400}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"model.path={qwen25_folder}", f"data.train_files={tmp_path}/a.jsonl"]


def whet(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The output of a command that succeeds."""
    with pytest.raises(SystemExit) as exit_:
        main(words)
    captured = capsys.readouterr()
    assert not exit_.value.code, captured.err
    return captured.out


def test_a_pipe_reads_template_ids_and_facts(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    shown = whet(capsys, "data", *arguments, "data.max_prompt_length=100", "--rows", "1")
    assert "a.jsonl: 2 rows\n" in shown and "1 of 2 are over data.max_prompt_length=100: dropped\n" in shown
    assert "  over data.max_prompt_length\n" in shown and "data sources: unknown 2\n" in shown
    _, row = shown.split("── row 0: ")
    assert row.startswith("16 tokens, then the policy generates\n") or "tokens, then the policy generates\n" in row
    assert "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n" in row
    assert "\nids: " in row and row.endswith("ground truth: 2\ndata source: unknown\nanswer: 2\n")
    assert "\x1b" not in shown


def test_one_row_token_by_token(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    shown = whet(capsys, "data", *arguments, "--index", "1", "--tokens")
    assert "── row 1: " in shown and "── row 0: " not in shown
    tokens = [line.split(maxsplit=3) for line in shown.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    lines = [each for each in tokens if len(each) == 4 and each[3].startswith("'")]
    assert lines[0][0] == "0" and lines[0][2:] == ["0", "'<|im_start|>'"]
    assert [int(each[0]) for each in lines] == list(range(len(lines)))
    assert f"ground truth: {'x' * 300} ...\n" in shown


@pytest.mark.slow
def test_what_is_learned_is_marked(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    words = [*arguments, "data.response_key=answer", "data.max_length=200"]  # keys of `whet sft` alone
    shown = whet(capsys, "data", *words, "--rows", "1")
    assert "<|im_start|>assistant\n⟦2<|im_end|>⟧\nids: " in shown
    assert "2 of them trained on" in shown
    assert "  1  '2'\n" in whet(capsys, "data", "--for", "sft", *words, "--rows", "1", "--tokens")


def test_on_a_terminal_tokens_have_stripes(
    capsys: pytest.CaptureFixture[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = whet(capsys, "data", *arguments, "--rows", "1")
    assert shown.count("\x1b[48;5;237m") >= 5 and shown.count("\x1b[48;5;240m") >= 5 and "ids:" not in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.train_files=gone.jsonl"], "ConfigError: data.train_files: gone.jsonl "),
        (["--index", "7"], "DataError: --index=7; .* 0 to 1"),
        (["--val"], r"ConfigError: data.val_files=\[\]; "),
        (["data.sampler=shufle"], "ConfigError: data.sampler: shufle; .*'shuffle'"),
        (["data.promt_key=a"], "ConfigError: data.promt_key: .*command line.* data.prompt_key"),
        (["--for", "train", "data.max_length=9"], "ConfigError: data.max_length: .*command line"),
    ],
)
def test_mistakes_are_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["data", *arguments, *words])
    assert exit_.value.code == 2 and re.match(said, capsys.readouterr().err)


def test_images_are_listed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = init_model(tmp_path / "model", "qwen2.5_vl", "nano", num_layers=1)
    Image.new("RGB", (224, 112), (0, 0, 255)).save(tmp_path / "blue.png")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "<image>?", "images": ["blue.png"], "answer": "b"}) + "\n")
    words = [f"model.path={folder}", f"data.train_files={tmp_path}/a.jsonl", "--thumbnails", str(tmp_path / "small")]
    shown = whet(capsys, "data", *words, "data.max_pixels=6272")
    count = load_items(DataConfig(train_files=[f"{tmp_path}/a.jsonl"], max_pixels=6272), load_tokenizer(folder))
    tokens = count.items[0].media[0].tokens
    assert tokens is not None and f"<|vision_start|><|image_pad|>×{tokens.count}<|vision_end|>?" in shown
    height, width = tokens.size
    assert f"image 0: {tokens.count} tokens, {width} x {height} pixels, " in shown
    with Image.open(tmp_path / "small" / "row_0_0.png") as image:
        assert image.size == (128, 64) and image.getpixel((5, 5)) == (0, 0, 255)


@pytest.mark.slow
def test_prompts_of_generate_are_shown_by_its_keys(
    capsys: pytest.CaptureFixture[str], arguments: list[str], tmp_path: Path
) -> None:
    words = ["--for", "generate", arguments[0], "chunk_size=3", "--rows", "1"]  # a key of `whet generate` alone
    shown = whet(capsys, "data", *words, f"input=[{tmp_path}/a.jsonl]")
    assert "a.jsonl: 2 rows\n" in shown and "user\n1+1=<|im_end|>\n" in shown
    assert "a.jsonl: 2 rows\n" in whet(capsys, "data", *words, f"data.val_files={tmp_path}/a.jsonl")
    with pytest.raises(SystemExit) as exit_:
        main(["data", *words, "input=[gone.jsonl]"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("ConfigError: input: gone.jsonl does not exist")
