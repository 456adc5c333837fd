# SPDX-License-Identifier: Apache-2.0
"""Rows with images and videos: every form becomes the same prompt."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.data.seeing import IMAGE, encoded, picture
from tests.raising import raises
from whet.config.preference import PreferenceDataConfig
from whet.config.schema import DataConfig, SupervisedDataConfig
from whet.config.sources import read_sources
from whet.data.load import load_items
from whet.data.media import MediaLimits, MediaReader, image, images
from whet.errors import DataError
from whet.types import Message, Prompt

WIDE, TALL = encoded(picture(56, 28)), encoded(picture(28, 84))  # 2 tokens, 3 tokens
FILM = [encoded(picture(28, 28, (each, 0, 0))) for each in range(3)]  # 2 times of 1 token


def prompts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], **keys: Any) -> tuple[Prompt, ...]:
    return load_items(DataConfig(train_files=["unused"], **keys), tokenizer, rows=rows).items


def text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def pads(tokenizer: Any, *counts: int) -> str:
    return "".join(f"<|vision_start|>{IMAGE * count}<|vision_end|>" for count in counts)


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def part(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


FORMS: list[Mapping[str, Any]] = [
    {"prompt": "A <image>B<image> C", "images": [WIDE, TALL]},  # EasyR1
    {"prompt": "A <image>B<image> C", "image": [{"bytes": WIDE, "path": None}, {"bytes": TALL, "path": "b.png"}]},
    {
        "prompt": [{"role": "user", "content": "A <image>B<image> C"}],
        "images": [{"bytes": WIDE}, {"bytes": TALL}],
    },  # verl
    {"prompt": "A <image>B<image> C", "images": [{"image": WIDE}, {"image": {"bytes": TALL}, "max_pixels": None}]},
    {"prompt": "A <image>B<image> C", "multi_modal_data": {"image": [WIDE, TALL]}},
    {"prompt": user(part("A <image>B<image> C")), "images": [WIDE, TALL]},
    {"prompt": user(part("A "), {"type": "image"}, part("B"), {"type": "image"}, part(" C")), "images": [WIDE, TALL]},
    {
        "prompt": user(
            {"type": "text", "text": "A ", "image": None},
            {"type": "image", "text": None, "image": {"bytes": WIDE, "path": "a.png"}},
            part("B"),
            {"type": "image", "image": TALL},
            part(" C"),
        )
    },
    {
        "prompt": user(part("A "), {"type": "image", "image": WIDE}, part("B"), {"type": "image"}, part(" C")),
        "image": TALL,
    },
]


@pytest.mark.parametrize("row", FORMS)
def test_every_form_is_the_same_prompt(sighted: PreTrainedTokenizerBase, row: Mapping[str, Any]) -> None:
    [prompt] = prompts(sighted, [row])
    content = f"A {pads(sighted, 2)}B{pads(sighted, 3)} C"
    assert text(sighted, prompt.token_ids) == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert [each.tokens.count for each in prompt.media if each.tokens] == [2, 3]
    assert [each.source for each in prompt.media] == [WIDE, TALL]
    parts = [part("A "), {"type": "image"}, part("B"), {"type": "image"}, part(" C")]
    assert prompt.messages == (Message("user", parts),)  # no bytes in messages, none in what the reward reads
    assert not prompt.extra_info


def test_videos_and_images_of_one_row_are_in_the_order_of_the_text(sighted: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "<video>then <image>and<video>", "images": [WIDE], "videos": [FILM, FILM[:1]]}
    [prompt] = prompts(sighted, [row])
    assert [(each.kind, each.tokens.count) for each in prompt.media if each.tokens] == [
        ("video", 2),
        ("image", 2),
        ("video", 1),
    ]
    shown = text(sighted, prompt.token_ids)
    assert [shown.count(pad) for pad in (IMAGE, "<|video_pad|>")] == [2, 3]
    assert shown.index("<|video_pad|><|video_pad|>") < shown.index(IMAGE) < shown.rindex("<|video_pad|>")
    [one] = prompts(sighted, [{"prompt": "<video>", "video": FILM}])  # of the single name: one video
    assert [each.frames for each in one.media] == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("row", "key", "fields"),
    [
        ({"prompt": "<image>"}, "number of images", {"found": 0, "expected": re.compile("^1,.*<image>.*'image'")}),
        ({"prompt": "hi", "images": [WIDE]}, "number of images", {"found": 1, "expected": re.compile("^0,")}),
        ({"prompt": "<image><image>", "images": [WIDE]}, "number of images",
         {"found": 1, "expected": re.compile("^2,")}),
        ({"prompt": "<image>", "videos": [FILM]}, "number of images", {"found": 0, "expected": re.compile("^1,")}),
        ({"prompt": "<image>", "images": [WIDE], "videos": [FILM]}, "number of videos",
         {"found": 1, "expected": re.compile("^0,")}),
        ({"prompt": user({"type": "image"})}, "number of images", {"found": 0, "expected": re.compile("^1,")}),
        ({"prompt": "<image>", "images": ["gone.png"]}, "image gone.png: gone.png", {}),
        ({"prompt": "<image>", "images": [WIDE[:50]]}, re.compile(r"^data: row 1: image \(bytes of 50 bytes\): \w+$"),
         {}),
        ({"prompt": "<video>", "videos": [[]]}, "video (list): number of frames", {"found": 0}),
        ({"prompt": "<image>" * 4, "images": [WIDE] * 4}, "number of media",
         {"found": 4, "expected": re.compile(r"data\.limit_images=3$")}),
        ({"prompt": "hi", "audio": {"bytes": b"x"}}, "audio", {}),
        ({"prompt": user({"type": "input_audio", "data": "x"})}, "message 0", {"found": re.compile("'input_audio'")}),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_the_row(
    sighted: PreTrainedTokenizerBase,
    row: Mapping[str, Any],
    key: str | re.Pattern[str],
    fields: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(DataError, f"data: row 1: {key}" if isinstance(key, str) else key, **fields):
        prompts(sighted, [{"prompt": "<image>", "images": [WIDE]}, row], limit_images=3)


def test_a_text_that_writes_the_models_own_token_stays_text(sighted: PreTrainedTokenizerBase) -> None:
    row = {"prompt": f"<image> is not {IMAGE}", "images": [WIDE]}
    [prompt] = prompts(sighted, [row])
    own = sighted.encoders.ids["image"]  # type: ignore[attr-defined]
    assert prompt.token_ids.count(own) == 2 and text(sighted, prompt.token_ids).count(IMAGE) == 3
    for options, key, found in (
        ({"chat_template_kwargs": {"sanitize_control_tokens": False}}, "chat template", re.compile(" 2 .* 1 ")),
        ({"apply_chat_template": False}, "media tokens", 3),
    ):
        with raises(DataError, f"data: row 0: {key}", found=found):
            prompts(sighted, [row], **options)  # type: ignore[arg-type]
    with raises(DataError, "data: row 0: media tokens", found=1, expected=re.compile("^0, .* 0 ")):
        prompts(sighted, [{"prompt": f"not {IMAGE}"}], apply_chat_template=False)


def test_a_template_without_placeholders_is_named(sighted: PreTrainedTokenizerBase) -> None:
    changed = copy.deepcopy(sighted)
    changed.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with raises(DataError, key="data: row 0: chat template", found=re.compile(r" 0 .*\(none\) .* 1 ")):
        prompts(changed, [FORMS[0] | {"prompt": "<image>", "images": [WIDE]}])


def test_without_the_chat_template_the_tag_becomes_what_the_template_would_write(
    sighted: PreTrainedTokenizerBase,
) -> None:
    row = {"prompt": "A <image>B", "images": [WIDE]}
    [prompt] = prompts(sighted, [row], apply_chat_template=False)
    assert text(sighted, prompt.token_ids) == f"A {pads(sighted, 2)}B"
    bare = copy.deepcopy(sighted)
    bare.chat_template = None
    [prompt] = prompts(bare, [row], apply_chat_template=False)
    assert text(bare, prompt.token_ids) == f"A {IMAGE * 2}B"


def test_image_tokens_count_towards_the_limit(
    sighted: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    large = encoded(picture(280, 280))  # 100 tokens
    rows = [{"prompt": "<image>", "images": [each]} for each in (WIDE, large)]
    assert [prompt.index for prompt in prompts(sighted, rows, max_prompt_length=60)] == [0]
    longest = len(prompts(sighted, rows)[1].token_ids)
    assert (1, 2, 60, longest, "1", "") in [record.args for record in caplog.records]
    prompts(sighted, rows[:1] + rows[1:] * 7, max_prompt_length=60)
    assert caplog.records[-1].args is not None and caplog.records[-1].args[4] == "1, 2, 3, 4, 5"  # type: ignore[index]
    assert "2" in caplog.records[-1].args[5]  # type: ignore[index]
    expected = re.compile("data.max_prompt_length=60$")
    with raises(DataError, key="data: row 1: prompt tokens", found=longest, expected=expected):
        prompts(sighted, rows, max_prompt_length=60, overlong_prompts="error")
    assert len(prompts(sighted, rows, max_prompt_length=60, max_pixels=28 * 28 * 16)) == 2


def test_a_format_prompt_is_filled_in_before_tags_are_read(sighted: PreTrainedTokenizerBase) -> None:
    row = {"problem": "<image>How many?", "images": [WIDE], "answer": "3"}
    keys = {"prompt_key": "problem", "format_prompt": "{{ content }} Box it.", "system_prompt": "Look."}
    [prompt] = prompts(sighted, [row], **keys)
    assert f"user\n{pads(sighted, 2)}How many? Box it.<|im_end|>" in text(sighted, prompt.token_ids)
    assert prompt.messages[0] == Message("system", "Look.") and prompt.ground_truth == "3"


def test_files_are_found_beside_the_data(sighted: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(WIDE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "<image>", "images": ["pictures/a.png"]}\n')
    data = DataConfig(train_files=[str(tmp_path / "rows.jsonl")])
    [prompt] = load_items(data, sighted).items
    assert prompt.media[0].source == str(tmp_path / "pictures" / "a.png")
    folder = tmp_path / "media"
    [prompt] = load_items(data, sighted, rows=[{"prompt": "<image>", "images": [TALL]}], media_folder=folder).items
    assert prompt.media[0].source == str(folder / f"{prompt.media[0].digest}.png")


def test_prompts_of_a_function_may_have_media(sighted: PreTrainedTokenizerBase) -> None:
    made = Prompt("", 0, (Message("user", "<image>?"),), (), "mine", None, media=(image(WIDE),))
    [prompt] = prompts(sighted, [made])
    assert prompt.media[0].tokens is not None and text(sighted, prompt.token_ids).count(IMAGE) == 2
    with raises(DataError, key="data: row 0: number of images", found=0):
        prompts(sighted, [Prompt("", 0, (Message("user", "<image>?"),), (), "mine", None)])


def test_a_text_model_keeps_tags_as_text_and_refuses_images(tokenizer: PreTrainedTokenizerBase) -> None:
    [prompt] = prompts(tokenizer, [{"prompt": "the tag <image>"}])
    assert "the tag <image>" in text(tokenizer, prompt.token_ids)
    with raises(DataError, key="data: row 0: message 0", found=re.compile("'image'")):
        prompts(tokenizer, [{"prompt": user({"type": "image", "image": WIDE})}])


def examples(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], **keys: Any) -> Any:
    return load_items(SupervisedDataConfig(train_files=["unused"], **keys), tokenizer, rows=rows).items


def test_examples_have_the_media_of_their_prompt(sighted: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "A <image>B<image> C", "images": [WIDE, TALL], "response": "five <image>"}
    [example] = examples(sighted, [row])
    [prompt] = prompts(sighted, [row])
    assert example.input_ids[: len(prompt.token_ids)] == prompt.token_ids and example.media == prompt.media
    learned = [token for token, mask in zip(example.input_ids, example.loss_mask, strict=True) if mask]
    assert text(sighted, learned) == f"five <image>{sighted.eos_token}"


def test_conversations_have_images_in_several_turns(sighted: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "user", "content": "<image>How wide?"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "And <image>?"},
        {"role": "assistant", "content": "one <image>"},  # the model's own text
    ]
    [example] = examples(sighted, [{"messages": messages, "images": [WIDE, TALL]}])
    shown = text(sighted, example.input_ids)
    assert shown.startswith(f"<|im_start|>user\n{pads(sighted, 2)}How wide?<|im_end|>")
    assert f"And {pads(sighted, 3)}?<|im_end|>" in shown and example.media[1].source == TALL
    learned = [token for token, mask in zip(example.input_ids, example.loss_mask, strict=True) if mask]
    assert text(sighted, learned) == "two<|im_end|>one <image><|im_end|>"


def test_an_example_is_not_cut_inside_an_image(sighted: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "three"},
    ]
    row = {"messages": messages, "images": [WIDE, TALL]}
    [whole] = examples(sighted, [row])
    own = sighted.encoders.ids["image"]  # type: ignore[attr-defined]
    second = [place for place, token in enumerate(whole.input_ids) if token == own][2]
    for length, num_media in ((second, 1), (second + 3, 2)):
        [cut] = examples(sighted, [row], max_length=length)
        assert (len(cut.input_ids), len(cut.media)) == (length, num_media)
    with raises(DataError, key="data: data.max_length", found=second + 1, expected=re.compile(" 1 ")):
        examples(sighted, [row], max_length=second + 1)


def test_pairs_with_media_are_refused(sighted: PreTrainedTokenizerBase) -> None:
    data = PreferenceDataConfig(train_files=["unused"])
    for row, key in (
        ({"prompt": "<image>", "images": [WIDE], "chosen": "a", "rejected": "b"}, "field 'images'"),
        ({"prompt": user({"type": "image", "image": WIDE}), "chosen": "a", "rejected": "b"}, "message 0"),
    ):
        with raises(DataError, key=f"data: row 0: {key}"):
            load_items(data, sighted, rows=[row])


BIG = encoded(picture(112, 112))  # 16 tokens
LIMITED: list[Mapping[str, Any]] = [
    {"prompt": "<image><image>", "images": [{"image": BIG, "max_pixels": 3136}, BIG]},
    {"prompt": "<image><image>", "images": [{"bytes": BIG, "path": None, "max_pixels": 3136.0}, {"image": BIG}]},
    {"prompt": user({"type": "image", "image": BIG, "max_pixels": 3136}, {"type": "image", "image": BIG})},
    {
        "prompt": user(
            {"type": "image_url", "image_url": {"bytes": BIG, "max_pixels": 3136}},
            {"type": "image", "image": BIG, "max_pixels": None},
        )
    },
]


@pytest.mark.parametrize("row", LIMITED)
def test_an_image_has_limits_of_its_own(sighted: PreTrainedTokenizerBase, row: Mapping[str, Any]) -> None:
    [prompt] = prompts(sighted, [row])
    assert [each.tokens.count for each in prompt.media if each.tokens] == [4, 16]
    assert len({each.digest for each in prompt.media}) == 2  # the same bytes, read in two sizes
    [whole] = prompts(sighted, [{"prompt": "<image>", "images": [BIG]}], max_pixels=3136)
    assert whole.media[0].digest == prompt.media[0].digest
    [raised] = prompts(sighted, [row], max_pixels=784, min_pixels=28)
    assert [each.tokens.count for each in raised.media if each.tokens] == [4, 1]


def test_a_video_has_limits_of_its_own(sighted: PreTrainedTokenizerBase) -> None:
    frames = [encoded(picture(56, 56, (each, 0, 0))) for each in range(12)]
    videos = [frames, {"video": frames}, {"video": frames, "max_frames": 4}, {"video": frames, "fps": 1}]
    videos += [{"video": [{"image": each} for each in frames], "max_pixels": 784, "fps": 0.5}]
    [prompt] = prompts(sighted, [{"prompt": "<video>" * 5, "videos": videos}], max_frames=8)
    assert [len(each.frames) for each in prompt.media] == [8, 8, 4, 8, 8]
    assert [each.tokens.grids[0] for each in prompt.media if each.tokens] == [(4, 2, 2)] * 2 + [
        (2, 2, 2),
        (4, 2, 2),
        (4, 1, 1),
    ]
    seconds = sighted.encoders.seconds  # type: ignore[attr-defined]
    assert sorted(each[-1] for each in seconds) == [4.5, 5.0, 5.0, 10.0, 20.0]


def test_limits_of_the_data_give_way_to_those_of_an_item(sighted: PreTrainedTokenizerBase) -> None:
    reader = MediaReader(MediaLimits(min_pixels=6000, max_pixels=9000), sighted.encoders)  # type: ignore[attr-defined]
    assert reader._for({"max_pixels": 3136}).limits == MediaLimits(min_pixels=3136, max_pixels=3136)
    assert reader._for({"min_pixels": 10_000}).limits == MediaLimits(min_pixels=10_000, max_pixels=10_000)
    assert reader._for({"min_pixels": 1, "max_pixels": None}).limits == MediaLimits(min_pixels=1, max_pixels=9000)


@pytest.mark.parametrize(
    ("item", "key", "fields"),
    [
        ({"image": BIG, "max_pixels": "many"}, "max_pixels", {"found": "many"}),
        ({"image": BIG, "min_pixels": 0}, "min_pixels", {"found": 0}),
        ({"image": BIG, "min_pixels": True}, "min_pixels", {"found": True}),
        ({"image": BIG, "min_pixels": 9, "max_pixels": 8}, "min_pixels",
         {"found": 9, "expected": re.compile("max_pixels=8$")}),
        ({"image": BIG, "resized_height": 28}, "resized_height", {"found": 28, "expected": re.compile("min_pixels")}),
    ],
)  # fmt: skip
def test_limits_that_cannot_be_followed_are_errors(
    sighted: PreTrainedTokenizerBase, item: Mapping[str, Any], key: str, fields: dict[str, object]
) -> None:
    named = re.compile(f"^data: row 0: image .*: {key}$")
    with raises(DataError, named, **fields):
        prompts(sighted, [{"prompt": "<image>", "images": [item]}])
    with raises(DataError, named, **fields):
        prompts(sighted, [{"prompt": user({"type": "image", **item})}])
    with raises(DataError, re.compile("^data: row 0: video .*: (min_pixels|max_pixels|resized_height)$")):
        prompts(sighted, [{"prompt": "<video>", "videos": [[item, item]]}])


def test_fields_of_media_have_any_name(
    sighted: PreTrainedTokenizerBase,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {"image_key": "pictures", "video_key": "films"}
    row = {"prompt": "<image><video>", "pictures": [WIDE], "films": [FILM], "images": "a caption", "level": 3}
    [prompt] = prompts(sighted, [row], **keys)
    assert [(each.kind, each.tokens.count) for each in prompt.media if each.tokens] == [("image", 2), ("video", 2)]
    assert prompt.extra_info == {"level": 3}
    with raises(DataError, re.compile("number of images$"), found=0, expected=re.compile("^1,")):
        prompts(sighted, [{"prompt": "<image>", "images": [WIDE]}], **keys)
    with raises(DataError, re.compile("field 'pictures'$")):
        prompts(tokenizer, [{"prompt": "two", "pictures": [WIDE]}], **keys)
    own = {"path": "own.jsonl", **keys}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jsonl").write_text("{}")
    assert read_sources("data.train_files", [own], DataConfig())[0].fields == keys
    [example] = load_items(
        SupervisedDataConfig(train_files=["unused"], **keys), sighted, rows=[{**row, "response": "two"}]
    ).items
    assert len(example.media) == 2


def test_damage_that_is_found_later_names_the_row(sighted: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(BIG)
    rows = [{"prompt": "none", "response": "a"}, {"prompt": "<image>", "images": [str(path)], "response": "a"}]
    [_, prompt], [_, example] = prompts(sighted, rows), examples(sighted, rows)
    path.write_bytes(BIG[:40])
    for media in (*prompt.media, *example.media):
        with raises(DataError, re.compile(r"^row 1: image \S+a.png \(digest \w{12}\): \w+$")):
            images(media)
