# SPDX-License-Identifier: Apache-2.0
"""Input that was made to hang, to fill the memory, to run code or to end in a traceback is refused by name, in time."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.dynamic_module_utils

from whet.cli.app import main

pytestmark = pytest.mark.slow
ROW = {"prompt": "one and one", "answer": "2"}
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(9) %}{% endfor %}{% endfor %}{% endfor %}"
)
GROWING = "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qwen25_folder: Path) -> Path:
    """A working folder with a model of bytes and a file of one row."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    shutil.copytree(qwen25_folder, "model")
    Path("rows.jsonl").write_text(json.dumps(ROW) + "\n")
    return tmp_path


def whet(*arguments: str) -> int:
    """Runs the command in this process and returns its exit status; any error that is not a WhetError raises here."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The message of a command that must be refused, in one paragraph."""

    def run(*arguments: str, seconds: float = 30.0) -> str:
        start = time.process_time()
        assert whet(*arguments) == 2
        assert time.process_time() - start < seconds
        return " ".join(capsys.readouterr().err.split())

    return run


def look(*overrides: str) -> tuple[str, ...]:
    return ("data", "model.path=model", "data.train_files=rows.jsonl", *overrides)


def train(*overrides: str) -> tuple[str, ...]:
    own = (
        "data.train_batch_size=1",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "trainer.total_steps=1",
    )
    return ("train", "model.path=model", "data.train_files=rows.jsonl", "reward.function=gsm8k", *own, *overrides)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ESCAPE, "row 0: format_prompt: .*access to attribute '__class__' of 'str' object is unsafe"),
        (ENDLESS, r"row 0: format_prompt: .*\b10 s\b"),
        (GROWING, r"row 0: format_prompt: .*\b1 GiB\b"),
        ("{{ 'a' * 10 ** 10 }}", r"row 0: format_prompt: .*\b1 GiB\b"),
        ("{{ content * 10 ** 6 }}", "row 0: .*11000050; .*4,000,000"),
        ("{{ 9 ** (9 ** 9) }}", r"row 0: format_prompt: .*\b(1 GiB|10 s)\b"),
        (
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "row 0: format_prompt: .*maximum",
        ),
        ("{{ 1 / 0 }}", "row 0: format_prompt: .*division by zero"),
        ("{% include '/etc/passwd' %}", "row 0: format_prompt: .*no loader"),
    ],
)
def test_a_prompt_template_runs_no_code_and_ends(template: str, said: str, refused: Callable[..., str]) -> None:
    Path("mine.jinja").write_text(template)
    found = refused(*look("data.format_prompt=mine.jinja"))
    assert re.search(f"(Data|Text)Error: rows.jsonl: {said}", found), found


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ESCAPE, "access to attribute '__class__' of 'str' object is unsafe"),
        (ENDLESS, r"\b10 s\b"),
        (GROWING, r"\b1 GiB\b"),
        # Harmless until a row makes it turn.
        (
            "{{ messages[0].content }}{% if '2' in messages[0].content %}" + ENDLESS + "{% endif %}",
            r"\b10 s\b",
        ),
    ],
)
def test_a_chat_template_runs_no_code_and_ends(template: str, said: str, refused: Callable[..., str]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(ROW | {"prompt": f"row {i}"}) + "\n" for i in range(3)))
    Path("model", "chat_template.jinja").write_text(template)
    found = refused(*look())
    row = 2 if "in messages" in template else 0
    assert re.search(f"DataError: rows.jsonl: row {row}: .*{said}", found), found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine.jinja", "DataError: .*mine.jinja.*'utf-8' codec"),
        ("model/chat_template.jinja", "ModelError: .*'utf-8' codec"),
    ],
)
def test_a_template_that_is_not_utf8(name: str, said: str, refused: Callable[..., str]) -> None:
    Path(name).write_bytes(b"{{ content }} \xff\xfe")
    assert re.search(said, refused(*look(*(["data.format_prompt=mine.jinja"] if name == "mine.jinja" else []))))


SURROGATE = '{"prompt": "a\\ud800b", "answer": "2"}'


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("rows.jsonl", json.dumps(ROW) + "\n" + '{"a":' * 100_000, "rows.jsonl:2: "),
        ("rows.json", "[" * 100_000, "rows.json: "),
        ("rows.jsonl", '{"prompt": "a", "n": ' + "9" * 5000 + "}", "rows.jsonl:1: .*4,300 digits"),
        ("rows.json", '[{"prompt": "a", "n": ' + "9" * 5000 + "}]", "rows.json: .*4,300 digits"),
        (
            "rows.jsonl",
            json.dumps(ROW) + "\n" + SURROGATE,
            r"rows.jsonl: row 1: .*character 18.* '<\|im_start\|>user\\na', .* surrogate pair",
        ),
        ("rows.jsonl", '{"prompt": [{"role": 5, "content": "a"}]}', "rows.jsonl: row 0: message 0: .*role.*5"),
        (
            "rows.jsonl",
            '{"prompt": [{"role": "user", "content": 5}]}',
            r"rows.jsonl: row 0: message 0: .*\b5\b.*parts",
        ),
        ("rows.jsonl", '{"prompt": [{"role": "user"}]}', "rows.jsonl: row 0: field 'prompt': .*list of messages"),
        ("rows.jsonl", '{"prompt": ["a"]}', "rows.jsonl: row 0: field 'prompt': .*list of messages"),
        ("rows.jsonl", json.dumps({"prompt": "a" * 20_000_000}), "20000050; .*4,000,000"),
        ("rows.jsonl", '{"prompt": 5}', "rows.jsonl: row 0: field 'prompt': .*list of messages"),
    ],
)
def test_rows_made_to_break_the_reader(file: str, content: str, said: str, refused: Callable[..., str]) -> None:
    Path(file).write_text(content)
    found = refused(*look(f"data.train_files={file}"), seconds=10)
    assert re.search(said, found), found


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "extra:\n" + "".join(f"  {line}\n" for line in BOMB.splitlines()),
            "mine.yaml:7: .* 100,000",
        ),
        ("extra: &a [*a]\n", "mine.yaml:1: .* 100,000"),
        ("extra: &a\n  b: *a\n", "mine.yaml:1: .* 100,000"),
        ("extra: " + "[" * 5000 + "]" * 5000, "mine.yaml: .* 50 levels"),
        ("extra: {n: " + "9" * 5000 + "}", r"mine\.yaml .*: .*\(4300 digits\)"),
        ("extra: {n: 0x" + "9" * 5000 + "}", r"extra\.n: .* 4,300 digits.* \(mine\.yaml:1\)"),
        ('extra: {s: "\\ud800"}', r"extra\.s: .* surrogate pair.* \(mine\.yaml:1\)"),
        ("extra: \x00", "mine.yaml: "),
        (b"extra: \xff\xfe", "mine.yaml: .*'utf-8' codec"),
        (
            "actor: {optim: {betas: [1, 1]}}",
            r"actor\.optim\.betas=\[1, 1\]; .* list of 2, each a number >= 0 and < 1; .*\(mine\.yaml:1\)",
        ),
        ("actor: {optim: {lr: .inf}}", "actor.optim.lr=inf; .* number >= 0; .*mine.yaml:1"),
        ("actor: {optim: {lr: .nan}}", "actor.optim.lr=nan; .* number >= 0; .*mine.yaml:1"),
        ("- a\n- b\n", "primary config 'mine'"),
        ("just text", "just text: "),
        ("model: [1, 2]", "mine.yaml .*: "),
        ("model: {1: 2}", "model.1: .*mine.yaml:1"),
        ("extra: !!python/object/apply:os.system ['touch owned']", "could not determine a constructor"),
        ("defaults: [nothing]\n", "nothing"),
        ("defaults: [mine]\n", "mine"),
        ("defaults: 5\n", "mine"),
    ],
)
def test_recipes_made_to_break_the_reader(content: str | bytes, said: str, refused: Callable[..., str]) -> None:
    Path("mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    found = refused("train", "mine.yaml", *train()[1:], seconds=10)
    assert found.startswith("ConfigError: ") and re.search(said, found), found
    assert not Path("owned").exists()


def test_a_part_of_a_recipe_is_read_within_limits_too(refused: Callable[..., str]) -> None:
    Path("data").mkdir()
    Path("data", "bomb.yaml").write_text(BOMB)
    Path("mine.yaml").write_text("defaults: [data: bomb, _self_]\n")
    found = refused("train", "mine.yaml", *train()[1:])
    assert re.search("mine.yaml .*: .* (GiB|10 s);", found)


@pytest.mark.parametrize(
    "override",
    ["extra.a=" + "[" * 400 + "]" * 400, "extra.a=" + "9" * 5000, "extra.a='\udcff'", "=", "a.b.=1", "model..path=x"],
)
def test_overrides_made_to_break_the_reader(override: str, refused: Callable[..., str]) -> None:
    assert refused(*train(override), seconds=20).startswith("ConfigError: ")


def test_a_missing_recipe_file_is_called_missing(refused: Callable[..., str]) -> None:
    for name in ("gone.yaml", "some/gone.yaml", "some/gone"):
        said = refused("train", name)
        assert said.startswith(f"ConfigError: recipe {name}: ") and str(Path.cwd()) in said


CONFIGS: list[dict[str, Any]] = [
    {"hidden_size": -128},
    {"hidden_size": 0},
    {"hidden_size": "many"},
    {"hidden_size": 1.5},
    {"hidden_size": 10**30},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": None},
    {"num_attention_heads": 0},
    {"num_attention_heads": 3},
    {"num_key_value_heads": 0},
    {"num_key_value_heads": -1},
    {"intermediate_size": -5},
    {"vocab_size": 0},
    {"vocab_size": "512"},
    {"vocab_size": True},
    {"max_position_embeddings": -1},
    {"max_position_embeddings": "long"},
    {"rms_norm_eps": "small"},
    {"hidden_act": "nothing"},
    {"hidden_act": 5},
    {"model_type": 5},
    {"model_type": "nothing"},
    {"layer_types": ["full_attention"]},
    {"layer_types": 7},
    {"rope_parameters": 7},
    {"rope_parameters": {"rope_type": "nothing"}},
    {"dtype": "float7"},
]


@pytest.mark.parametrize("values", CONFIGS, ids=str)
def test_model_configs_with_absurd_values(values: dict[str, Any], refused: Callable[..., str]) -> None:
    config = Path("model", "config.json")
    known = json.loads(config.read_text())
    known.pop("layer_types", None)
    config.write_text(json.dumps(known | values))
    found = refused(*train("--dry-run"))
    assert found.startswith(("ModelError: model", "ConfigError: ")), found


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"5",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"eos_token_id": "x", "eos_token": 5, "model": 5, "vocab_size": []}',
    ],
    ids=["empty", "list", "number", "null", "bytes", "deep", "digits", "types"],
)
def test_files_of_a_model_folder_that_are_something_else(
    name: str, content: bytes, refused: Callable[..., str]
) -> None:
    Path("model", name).write_bytes(content)
    found = refused(*train("--dry-run"))
    assert found.startswith("ModelError: ") and "model" in found, found


OWN_CODE = """
import pathlib
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
pathlib.Path("owned").touch()
class OwnConfig(Qwen2Config):
    model_type = "own"
class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(Qwen2Tokenizer):
    pass
"""


def owned(*names: str) -> None:
    """Gives the folder code of its own."""
    Path("model", "own.py").write_text(OWN_CODE)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    for name in names:
        file = Path("model", name)
        values = json.loads(file.read_text())
        values |= (
            {"model_type": "own", "auto_map": classes}
            if name == "config.json"
            else {
                "tokenizer_class": "OwnTokenizer",
                "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]},
            }
        )
        file.write_text(json.dumps(values))


def test_a_models_own_code_runs_only_where_the_key_says_so(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    owned("tokenizer_config.json")
    assert whet(*look()) == 0  # transformers has a tokenizer of its own for such a model
    owned("config.json")
    found = refused(*look())
    assert found.startswith("ModelError: model: ") and "model.trust_remote_code=true" in found
    assert not Path("owned").exists()
    assert whet(*look("model.trust_remote_code=true")) == 0
    assert Path("owned").exists()


def test_a_models_own_code_trains_and_saves_where_it_is_trusted(refused: Callable[..., str]) -> None:
    owned("config.json", "tokenizer_config.json")
    assert (
        whet(*train("model.trust_remote_code=true", "trainer.run_dir=run", "trainer.val_freq=-1", "rollout.n=2")) == 0
    )
    assert Path("run", "metrics.jsonl").is_file()
    assert "trust" in refused("export", "run", "out")
    assert whet("export", "run", "out", "--trust-remote-code") == 0
    assert {"model.safetensors", "own.py"} <= {file.name for file in Path("out").iterdir()}


OWN_TEXT = """
from whet.environments.protocol import Observation
from whet.types import Message

def score(solution_str, ground_truth, extra_info):
    if len(solution_str) % 2:
        raise ValueError(f"no {ground_truth}")
    return {"score": float(len(solution_str)), "pred": "\\ud800", "p\\ud800": 1.0}

class Environment:
    def __init__(self, prompt, *, said="fine"):
        self.said = said

    def step(self, answer):
        return Observation(done=False, messages=(Message("tool", self.said),))
"""


def rollouts(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "rollouts", "step_000001.jsonl").read_text().splitlines()]


def test_half_a_surrogate_pair_ends_no_run_wherever_it_stands(refused: Callable[..., str]) -> None:
    Path("mine.py").write_text(OWN_TEXT)
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "\\ud800", "data_source": "\\udfff"}\n')
    own = ("reward.function=mine.py:score", "rollout.n=8", "trainer.log_tokens=1", "trainer.run_dir=run")
    assert whet(*train(*own)) == 0
    answers = rollouts("run")
    assert {answer["ground_truth"] for answer in answers} == {"\ud800"}
    assert {answer["extracted"] for answer in answers} == {"\ud800", None}
    assert {answer["failure"] and answer["failure"]["message"][:16] for answer in answers} == {
        None,
        "ValueError: no \ud800",
    }
    Path("mine.py").write_text(OWN_TEXT.replace('said="fine"', 'said="\\udcff"'))
    said = train("environment.name=mine.py:Environment", *own[:2], "trainer.run_dir=other")
    found = refused(*said)
    assert re.search(" 0:0:0 in the environment: .*character 29", found) and "surrogate" in found, found
