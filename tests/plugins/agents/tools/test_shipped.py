# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from episodes import episode
from transformers import AutoTokenizer

from tests.raising import raises
from whet.config.schema import EnvironmentConfig
from whet.errors import ConfigError, SandboxError
from whet.plugins.agents.tools.sandbox import Python, with_last_value
from whet.plugins.agents.tools.shipped import BM25, Search, calculator, words
from whet.plugins.agents.tools.toolbox import toolbox_of
from whet.programs.protocol import open_sandbox

DOCUMENTS = ["the red cat", "a red red dog", "Blue birds sing", "cat and dog and cat"]


def test_bm25_is_its_formula() -> None:
    """N = 4, mean length 15 / 4 = 3.75. red: n = 2, idf = ln(1 + 2.5 / 2.5) = ln 2; document 0 has tf = 1 and length 3,
    document 1 has tf = 2 and length 4."""
    found = BM25(DOCUMENTS).scores("RED, whale!")
    norms = [1.2 * (0.25 + 0.75 * 3 / 3.75), 1.2 * (0.25 + 0.75 * 4 / 3.75)]
    assert found == pytest.approx({0: math.log(2) * 2.2 / (1 + norms[0]), 1: math.log(2) * 4.4 / (2 + norms[1])})
    assert BM25(DOCUMENTS).best("red", 5) == [DOCUMENTS[1], DOCUMENTS[0]]
    assert BM25(DOCUMENTS).best("cat dog", 1) == [DOCUMENTS[3]]
    assert BM25([]).best("cat", 1) == BM25(DOCUMENTS).best("", 1) == []


def test_characters_of_chinese_and_japanese_are_words() -> None:
    """They have no spaces; a whole sentence as one word would never be found."""
    assert words("北京是首都。 Beijing 2008年") == ["北", "京", "是", "首", "都", "beijing", "2008", "年"]
    assert words("カタ・かな, über_x 서울") == ["カ", "タ", "か", "な", "über_x", "서울"]
    documents = ["上海在长江口。", "北京是中国的首都。", "鲸鱼是红色的。"]
    assert BM25(documents).best("中国首都是哪里?", 1) == [documents[1]]
    assert BM25(documents).best("红鲸鱼", 5) == [documents[2]]


def test_search_reads_a_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "Rivers", "text": "The Aare is in Bern."}\n{"text": "Bern has bears."}\n')
    tool = Search(corpus=str(corpus), top=1)
    assert tool.search("aare") == "Rivers\nThe Aare is in Bern."
    assert tool.search("bears of Bern") == "Bern has bears."
    assert tool.search("whale") == "nothing found; try other words"
    assert Search(corpus=str(corpus)).search("bern").count("\n\n") == 1
    separators = "\u2028 \u2029 \x85"  # of lines for str.splitlines, and not for JSON
    (tmp_path / "lines.jsonl").write_text(f'{{"text": "a {separators} whale"}}\r\n{{"text": "a bear"}}')
    assert Search(corpus=str(tmp_path / "lines.jsonl"), top=5).search("whale") == f"a {separators} whale"
    (tmp_path / "none.jsonl").write_text("")
    assert Search(corpus=str(tmp_path / "none.jsonl")).search("whale") == "nothing found; try other words"
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    with raises(ConfigError, f"corpus {tmp_path}/bad.jsonl, line 2", found=repr('{"body": "b"}')):
        Search(corpus=str(tmp_path / "bad.jsonl"))
    place = "environment.tools[0]: Search.prepare"
    with raises(ConfigError, f"{place}: corpus", found=re.compile(r"^nowhere\.jsonl .*No such file")):
        toolbox_of(EnvironmentConfig(tools=[{"python": "search", "options": {"corpus": "nowhere.jsonl"}}]))
    with raises(ConfigError, "environment.tools[0].options.corpus", found=None):
        toolbox_of(EnvironmentConfig(tools=["search"]))


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(1 + 1)", "2"),
        ("x = 6\nx * 7", "42"),
        ("s = 'é'; s + s", "'éé'"),
        ("[\n  1,\n  2,\n]", "[1, 2]"),
        ("None", "(no output)"),
        ("x = 1", "(no output)"),
        ("print('a')\n1 / 0", "a\nerror: "),
        ("def f(:", "error: "),
    ],
)
def test_python_programs(code: str, shown: str) -> None:
    found = Python(sandbox="unisolated").python(code)
    assert found == shown or (shown.endswith("error: ") and found.startswith(shown))
    assert "ZeroDivisionError" in found or "1 / 0" not in code


def test_an_endless_program_is_ended() -> None:
    assert Python(sandbox="unisolated", seconds=0.5).python("print('a', flush=True)\nwhile True: pass") == (
        "a\nerror: the limit of timeout ended the program"
    )


def test_python_in_bubblewrap() -> None:
    try:
        open_sandbox("bubblewrap")
    except SandboxError as error:
        pytest.skip(f"bubblewrap holds no programs here: {error}")
    assert Python().python("import os\nos.listdir('/home') if os.path.exists('/home') else []") == "[]"


def test_code_that_is_no_python_stays_as_it_is() -> None:
    assert with_last_value("1 +") == "1 +" and with_last_value("") == "" and with_last_value("x = 1") == "x = 1"


@pytest.mark.slow
def test_the_shipped_tools_in_an_episode(qwen25_folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": "Bern has bears."}) + "\n")
    config = EnvironmentConfig(
        tools=[
            "calculator",
            {"python": "search", "options": {"corpus": str(corpus)}},
            {"python": "python", "options": {"sandbox": "unisolated"}},
        ]
    )
    calls = [
        {"name": "calculator", "arguments": {"expression": "12*7"}},
        {"name": "search", "arguments": {"query": "bears"}},
        {"name": "python", "arguments": {"code": "2**10"}},
    ]
    turn = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    tokenizer = AutoTokenizer.from_pretrained(qwen25_folder)
    trajectory = episode(tokenizer, config, [turn, "Done."])
    results = [message.content for message in trajectory.messages if message.role == "tool"]
    assert results == [calculator("12*7"), "Bern has bears.", "1024"] and results[0] == "84"
