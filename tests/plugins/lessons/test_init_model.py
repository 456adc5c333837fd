# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.raising import raises
from whet.errors import ConfigError
from whet.plugins.lessons.init_model import SAMPLE_TEXT, init_model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def num_parameters(rows: int, layers: int, hidden: int, head_dim: int, *, qwen3: bool) -> int:
    """Counted from the architecture: tied embeddings, q and o, k and v at half width, three MLP matrices, norms."""
    attention = 2 * hidden * hidden + 2 * hidden * (hidden // 2)
    biases_or_head_norms = 2 * head_dim if qwen3 else 2 * hidden
    layer = attention + 3 * hidden * (3 * hidden) + 2 * hidden + biases_or_head_norms
    return rows * hidden + layers * layer + hidden


@pytest.mark.parametrize(("arch", "expected"), [("qwen3", 3_279_616), ("qwen2.5", 3_281_152)])
def test_tiny_is_the_documented_shape_and_loads_with_plain_transformers(
    tmp_path: Path, arch: str, expected: int
) -> None:
    out = init_model(tmp_path / "model", arch, "tiny", vocab_size=512, seed=3)
    model = AutoModelForCausalLM.from_pretrained(out)
    config = model.config
    shape = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size)
    assert shape == (4, 256, 768, 512)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert model.num_parameters() == expected == num_parameters(512, 4, 256, 64, qwen3=arch == "qwen3")
    assert config.model_type == {"qwen3": "qwen3", "qwen2.5": "qwen2"}[arch]
    assert model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == 512
    generation = GenerationConfig.from_pretrained(out)
    assert tokenizer.convert_ids_to_tokens(generation.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == generation.pad_token_id == tokenizer.pad_token_id


def test_nano_with_an_alphabet_has_eight_tenths_of_a_million_parameters(tmp_path: Path) -> None:
    out = init_model(tmp_path / "model", "qwen3", "nano", alphabet="0123456789+-*= ")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.num_parameters() == num_parameters(32, 4, 128, 32, qwen3=True) == 791_936


def test_overrides_change_the_shape(tmp_path: Path) -> None:
    out = init_model(tmp_path / "model", "qwen3", "tiny", vocab_size=300, hidden_size=128, num_layers=2)
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() == num_parameters(300, 2, 128, 64, qwen3=True)


@pytest.mark.parametrize("options", [{}, {"alphabet": "0123456789+="}])
def test_equal_arguments_write_equal_bytes_and_leave_torch_alone(tmp_path: Path, options: dict[str, str]) -> None:
    state = torch.random.get_rng_state()
    first = contents(init_model(tmp_path / "first", "qwen3", "nano", seed=7, **options))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    assert contents(init_model(tmp_path / "second", "qwen3", "nano", seed=7, **options)) == first
    other = contents(init_model(tmp_path / "other", "qwen3", "nano", seed=8, **options))
    assert [name for name in first if first[name] != other[name]] == ["model.safetensors"]


@pytest.mark.parametrize("arch", ["qwen2.5", "qwen3"])
def test_a_conversation_survives_encoding(tmp_path: Path, arch: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(init_model(tmp_path / "model", arch, "nano"))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Was macht 12 + 34? — „genau“ 数学 🙂\n\n"},
        {"role": "assistant", "content": " 46\t"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWas macht 12 + 34? — „genau“ 数学 🙂\n\n<|im_end|>\n"
        "<|im_start|>assistant\n 46\t<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_single_tokens_and_frequent_words_are_not_split(tmp_path: Path) -> None:
    texts = ["counting 1234 counting 1234 counting"] * 10
    tokenizer = AutoTokenizer.from_pretrained(init_model(tmp_path / "model", "qwen3", "nano", texts=texts))
    assert tokenizer.tokenize("counting 1234") == ["counting", "Ġ", "1", "2", "3", "4"]


def test_rows_are_what_was_asked_or_the_tokenizer_rounded_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rounded = init_model(tmp_path / "rounded", "qwen3", "nano", texts=["ab ab"])
    num_tokens = len(AutoTokenizer.from_pretrained(rounded))
    assert num_tokens == 256 + 3 + 2  # ab, Ġab
    assert AutoModelForCausalLM.from_pretrained(rounded).config.vocab_size == 264
    asked = init_model(tmp_path / "asked", "qwen3", "nano", texts=["ab ab"], vocab_size=300)
    assert AutoModelForCausalLM.from_pretrained(asked).config.vocab_size == 300
    said = [
        each.args
        for each in caplog.records
        if each.name == "whet.plugins.lessons.init_model" and len(each.args or ()) == 2
    ]
    assert said == [(261, 39)]


def test_tools_and_their_results_are_rendered(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(init_model(tmp_path / "model", "qwen3", "nano"))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Calculate."},
        {"role": "user", "content": "1 + 1 and 1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[{"name": "add"}], tokenize=False, add_generation_prompt=True)
    assert text == (
        '<|im_start|>system\nCalculate.\n\nYou can call these functions:\n<tools>\n{"name": "add"}\n</tools>\n'
        'A call looks like this:\n<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n1 + 1 and 1 + 2?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_an_alphabet_has_one_token_a_character_and_refuses_others(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(init_model(tmp_path / "model", "qwen3", "nano", alphabet="01+= é"))
    assert tokenizer.tokenize("10 + 1=é") == list("10 + 1=é")
    messages = [{"role": "user", "content": "10+1="}, {"role": "tool", "content": "11"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # start user \n 1 0 + 1 = end \n, start user \n open \n 1 1 \n close end \n, start assistant \n
    assert len(ids) == 10 + 11 + 3
    assert tokenizer.decode(tokenizer.encode("<|im_start|>1 1<|im_end|>"), skip_special_tokens=True) == "1 1"
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("2")


def test_the_sample_text_fills_the_vocabularies_of_the_small_sizes(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(init_model(tmp_path / "model", "qwen3", "nano"))
    assert len(tokenizer) == 512
    assert len(tokenizer.encode(SAMPLE_TEXT)) < 0.6 * len(SAMPLE_TEXT)


@pytest.mark.parametrize(
    ("options", "key", "found", "expected"),
    [
        ({"arch": "gpt2"}, "arch", "gpt2", "qwen2.5, qwen3, qwen3_moe, llama, mistral, gemma, gemma2, phi"),
        ({"size": "huge"}, "size", "huge", "nano, tiny, small, base"),
        ({"hidden_size": 100}, "hidden_size", 100, " 128 "),
        ({"num_layers": 0}, "num_layers", 0, "1"),
        ({"vocab_size": 200}, "vocab_size", 200, " 259: 256 bytes and 3 "),
        ({"alphabet": "ab", "arch": "qwen2.5"}, "arch", "qwen2.5", "alphabet"),
        ({"alphabet": "ab", "texts": ["ab"]}, "alphabet and texts", re.compile("both"), ""),
        ({"alphabet": "ab", "vocab_size": 12}, "vocab_size", 12, " 13 "),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, options: dict[str, object], key: str, found: object, expected: str
) -> None:
    with raises(ConfigError, key, found=found, expected=re.compile(expected)):
        init_model(tmp_path / "model", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with raises(ConfigError, f"{tmp_path}"):
        init_model(tmp_path, "qwen3", "nano")
    assert contents(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("below", ["link", "file/model"])
def test_a_folder_that_cannot_be_made_is_a_mistake(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with raises(ConfigError, f"{tmp_path / below}"):
        init_model(tmp_path / below, size="nano")
