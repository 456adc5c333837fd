# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st
from PIL import Image
from transformers import PreTrainedTokenizerBase

from tests.data.seeing import encoded, picture
from tests.raising import raises
from whet.config.schema import EvalConfig, SFTConfig, TrainConfig
from whet.data.load import EntryCounts
from whet.data.preview import histogram, percentile, pieces, preview, shortened, spans, thumbnail
from whet.errors import DataError


def test_pieces_are_the_text_of_each_token(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "<|im_start|>user\n  Zwölf 日本語 🙂🙂 and the end.<|im_end|>\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = pieces(tokenizer, ids)
    assert len(shown) == len(ids) and "".join(shown) == text
    assert shown[0] == "<|im_start|>" and "日" in shown and "🙂" in shown
    broken = tokenizer("日", add_special_tokens=False)["input_ids"][:-1]
    assert pieces(tokenizer, broken)[-1] == "\ufffd"
    assert pieces(tokenizer, []) == []


def test_spans_join_what_has_one_mask() -> None:
    assert spans(["a", "b", "c", "d"], [0, 1, 1, 0]) == [(0, "a"), (1, "bc"), (0, "d")]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_percentiles_and_bins_count_every_row(lengths: list[int], share: float) -> None:
    found = percentile(sorted(lengths), share)
    assert sum(length <= found for length in lengths) >= share * len(lengths) - 1e-9
    assert sum(length < found for length in lengths) < share * len(lengths)
    bins = histogram(lengths)
    assert len(bins) <= 10 and sum(count for _, _, count in bins) == len(lengths)
    assert all(count == sum(low <= length <= high for length in lengths) for low, high, count in bins)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_over_the_limit_are_counted_and_shown(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * n, "answer": str(n), "data_source": "s" if n > 2 else "t"} for n in (1, 40, 2, 50)]
    data = {"train_files": [write(tmp_path / "a.jsonl", rows)], "apply_chat_template": False, "max_prompt_length": 30}
    config = TrainConfig.model_validate({"data": {**data, "shuffle": False, "val_files": data["train_files"]}})
    found = preview(config, tokenizer, num_rows=2)
    assert found.lengths == [1, 40, 2, 50] and (found.num_over, found.over_limit) == (2, "dropped")
    assert found.parts == (EntryCounts(str(tmp_path / "a.jsonl"), 4, 4, 4),)
    assert found.data_sources == {"s": 2, "t": 2} and found.num_unanswered == 0
    assert [(row.title, len(row.token_ids), row.mask) for row in found.rows] == [
        ("row 0", 1, None),
        ("row 1", 40, None),
    ]
    assert found.rows[1].facts == {"ground truth": "40", "data source": "s", "answer": "40"}
    assert [row.title for row in preview(config, tokenizer, num_rows=2, index=3).rows] == ["row 3"]
    drawn = preview(config, tokenizer, num_rows=3, drawn=True)
    assert [row.title for row in drawn.rows] == ["row 0", "row 2", "row 0"]
    with raises(DataError, key="--index", found=4, expected=re.compile("row, from 0 to 3")):
        preview(config, tokenizer, num_rows=2, index=4)
    evaluation = EvalConfig.model_validate({"data": {**data, "train_files": [], "val_files": data["train_files"]}})
    assert preview(evaluation, tokenizer, num_rows=0).lengths == found.lengths
    assert preview(config, tokenizer, num_rows=1, validation=True).lengths == found.lengths


def test_examples_are_cut_and_show_what_is_learned(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "11", "response": "7" * n} for n in (3, 20)])
    data = {"train_files": [file], "apply_chat_template": False, "max_length": 10}
    config = SFTConfig.model_validate({"data": data})
    found = preview(config, tokenizer, num_rows=5)
    assert found.lengths == [6, 23] and (found.num_over, found.over_limit) == (1, "cut")
    assert [row.mask for row in found.rows] == [(0, 0, 1, 1, 1, 1), (0, 0, *[1] * 8)]
    assert len(preview(config, tokenizer, num_rows=5, drawn=True).rows) == 5
    assert [row.title for row in preview(config, tokenizer, num_rows=5, index=1).rows] == ["example 1"]
    with raises(DataError, key="--index", found=2, expected=re.compile("example.* 0 .* 1$")):
        preview(config, tokenizer, num_rows=5, index=2)


def test_rows_with_images_have_thumbnails(sighted: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "wide.png").write_bytes(encoded(picture(560, 280)))
    (tmp_path / "film.gif").write_bytes(
        encoded(picture(), "GIF", save_all=True, append_images=[picture(colour=(0, 0, 9))], duration=500)
    )
    rows = [{"prompt": "<image>and <video>", "images": ["wide.png"], "videos": ["film.gif"], "answer": "1"}]
    data = {"train_files": [write(tmp_path / "a.jsonl", rows)]}
    [row] = preview(TrainConfig.model_validate({"data": data}), sighted, num_rows=1).rows
    assert [each.tokens.count for each in row.media if each.tokens] == [200, 2]
    shown = shortened(str(sighted.decode(list(row.token_ids))), row.media)
    assert "<|image_pad|>×200<|vision_end|>and <|vision_start|><|video_pad|>×2<" in shown
    for number, size in ((0, (128, 64)), (1, (112, 28))):  # two frames of 56 x 28 side by side
        thumbnail(row.media[number], tmp_path / "small" / f"{number}.png")
        with Image.open(tmp_path / "small" / f"{number}.png") as image:
            assert image.size == size and image.getpixel((3, 3)) == (200, 30, 30)
