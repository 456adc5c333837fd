# SPDX-License-Identifier: Apache-2.0
"""Instructions of IFEval: cases worked by hand, and lm-eval's independent implementation on the same texts."""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
import time
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest

from tests.raising import raises
from whet.errors import DataError
from whet.plugins.scores.ifeval import CHECKS, compute_score, count_capital_words, count_sentences


class FakeLanguages(ModuleType):
    """langdetect's interface: the language by the script of most letters."""

    class LangDetectException(Exception):  # noqa: N818  # langdetect's name
        """Raised by langdetect for a text without letters."""

    DetectorFactory = SimpleNamespace(seed=None)

    def detect(self, text):
        scripts = Counter("ru" if "\u0430" <= each.lower() <= "\u044f" else "en" for each in text if each.isalpha())
        if not scripts:
            raise self.LangDetectException("no features in text")
        return scripts.most_common(1)[0][0]


@pytest.fixture
def languages(monkeypatch):
    fake = FakeLanguages("langdetect")
    monkeypatch.setitem(sys.modules, "langdetect", fake)
    return fake


def truth(*instructions):
    return {"instruction_id_list": [each[0] for each in instructions], "kwargs": [each[1] for each in instructions]}


def follows(text, name, **arguments):
    return compute_score(text, truth((name, arguments)))["reward"] == 1.0


CASES = [  # instruction, arguments, a text that follows it, a text that does not
    ("keywords:existence", {"keywords": ["sea", "salt"]}, "Salt of the SEA", "sea"),
    ("keywords:frequency", {"keyword": "ha", "relation": "at least", "frequency": 3}, "Ha ha haha", "ha ha"),
    ("keywords:frequency", {"keyword": "ha", "relation": "less than", "frequency": 2}, "ha", "haha"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "a Cat."),
    ("keywords:letter_frequency", {"letter": "e", "let_relation": "less than", "let_frequency": 2}, "be", "bEe"),
    ("keywords:letter_frequency", {"letter": "E", "let_relation": "at least", "let_frequency": 2}, "Eel", "be"),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}, "Ah. Oh!", "Dr. No, 3.5 m."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo\n***\n", "one\n***\n***\ntwo"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 4}, "it's me", "it's me, me"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Second"},
        "First one.\n\n'second, and last",
        "Second one.\n\nFirst one.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [a [b]", "[name\n]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. more", "Bye. PS more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S. more", "Bye. P.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n  - b", "* a\n** b"),
    ("detectable_format:constrained_response", {}, "Well. My answer is no.", "My answer is NO."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and * *"),
    ("detectable_format:multiple_sections", {"section_spliter": "PART", "num_sections": 2}, "PART 1 PART2", "PART 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >>\ntext"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, " say hi. Hi!", "Hi! Say hi."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So. "the end."', "The end. Really."),
    ("startend:quotation", {}, '"Hi."', '"Hi.'),
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 2}, "NO A", "NO a"),
    ("change_case:english_capital", {}, "HELLO", "HELLo"),
    ("change_case:english_lowercase", {}, "hello", "Hello"),
    ("language:response_language", {"language": "ru"}, "привет", "hello"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_an_instruction_is_followed_or_not(name, arguments, good, bad, languages):
    assert follows(good, name, **arguments)
    assert not follows(bad, name, **arguments)
    assert not follows(" \n", name, **arguments)


def test_each_instruction_has_a_case():
    assert {name for name, *_ in CASES} == set(CHECKS) and len(CHECKS) == 25


def test_each_result_stays_with_its_instruction():
    """Results in a list misalign where a loop continues past one of them, as for the empty arguments here."""
    mixed = truth(
        ("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["b"]}), ("startend:quotation", None)
    )
    assert compute_score("a b", mixed) == {"reward": 0.0, "accuracy": 0.0, "followed": 2 / 3}
    assert compute_score("a, b", mixed, score="fraction") == {"reward": 1 / 3, "accuracy": 0.0, "followed": 1 / 3}
    assert compute_score('"a b"', mixed) == {"reward": 1.0, "accuracy": 1.0, "followed": 1.0}


def test_loose_forgives_the_first_and_last_line_and_stars():
    quoted = truth(("startend:quotation", {}))
    for text in ('Sure:\n"Hi."', '"Hi."\nBye', 'Sure:\n"Hi."\nBye', '**"Hi."**', 'Sure:\n**"Hi."**'):
        assert compute_score(text, quoted)["reward"] == 0.0
        assert compute_score(text, quoted, mode="loose")["reward"] == 1.0
    assert compute_score('A\nB\n"Hi."', quoted, mode="loose")["reward"] == 0.0


def test_the_thought_is_no_part_of_the_response():
    assert compute_score("<think>a, b</think>a b", truth(("punctuation:no_comma", {})))["reward"] == 1.0


def test_the_forms_of_a_row():
    row = truth(("keywords:frequency", {"keyword": "a", "relation": "at least", "frequency": 2.0, "num_words": None}))
    for ground_truth, extra in ((row, {}), (json.dumps(row), {}), ("", row), (None, row)):
        assert compute_score("a a", ground_truth, extra)["reward"] == 1.0


@pytest.mark.parametrize(
    ("ground_truth", "fields"),
    [
        ("7", {"key": "ground_truth", "found": "'7'", "change": re.compile("extra_info")}),
        ("{not json", {"key": "ground_truth", "found": "'{not json'"}),
        ({"instruction_id_list": [], "kwargs": []}, {"key": "ground_truth", "expected": re.compile("not empty")}),
        (
            {"instruction_id_list": ["startend:quotation"], "kwargs": []},
            {"key": "kwargs", "found": re.compile(r"^0\b.*\b1\b")},
        ),
        (
            truth(("startend:quote", {})),
            {"key": "instruction_id_list", "found": "startend:quote", "expected": re.compile("keywords:existence, ")},
        ),
        (truth(("keywords:existence", "cat")), {"key": "keywords:existence: keywords", "found": None}),
        (truth(("keywords:existence", {})), {"key": "keywords:existence: keywords", "found": None}),
        (
            truth(("length_constraints:number_words", {"relation": "more than", "num_words": 3})),
            {
                "key": "length_constraints:number_words: relation",
                "found": "more than",
                "expected": re.compile("less than, at least"),
            },
        ),
        (
            truth(("length_constraints:number_words", {"relation": "less than", "num_words": "3"})),
            {"key": "length_constraints:number_words: num_words", "found": "3"},
        ),
        (
            truth(("keywords:existence", {"keywords": ["C("]})),
            {"key": "keyword", "found": re.compile(r"^'C\('"), "change": re.compile(r"\\")},
        ),
    ],
)
def test_a_wrong_row_is_an_error(ground_truth, fields):
    with raises(DataError, **fields):
        compute_score("text", ground_truth)


def test_a_missing_detector_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with raises(DataError, "change_case:english_capital", change=re.compile(r"pip install .*langdetect")):
        compute_score("HELLO", truth(("change_case:english_capital", {})))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("No stop", 1),
        ("One. Two? Three! Four", 4),
        ("Dr. Smith paid 3.50 dollars. He left.", 2),
        ('"Hi." She left. (Why?) "No!"', 4),
        ("J. Smith, e.g. at 5 p.m. on Monday.", 1),
        ("Well... maybe. But... No.", 3),
        ("in 1999. then so", 1),
        ("in 1999. Then so", 2),
        ("**Bold!** Next.", 2),
        ("The answer is no. We go.", 2),
    ],
)
def test_sentences(text, count):
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("NO WAY", 2),
        ("DON'T", 2),
        ("I'm A B-C", 3),
        ("AT&T (USA)", 3),
        ("A,B 10:30PM", 3),
        ("U.S. Us", 1),
        ("CANNOT", 2),
    ],
)
def test_capital_words(text, count):
    assert count_capital_words(text) == count


@pytest.mark.parametrize("unit", [".", "[", "<", "*", "\n", "- ", "((", '"', "a", "!)", "A'", "<<x ", "{"])
def test_a_long_response_is_checked_at_once(unit, languages):
    row = truth(*((name, arguments) for name, arguments, *_ in CASES))
    start = time.process_time()
    compute_score(unit * (100_000 // len(unit)), row)
    assert time.process_time() - start < 2.0


# -- lm-eval -----------------------------------------------------------------------------------------------------------

PIECES = [
    "the cat sat", "a sea of salt", "NASA", "USA", "I", "Hello there", "hello", "HELLO WORLD", "DON'T", "it's",
    "IT'S", "Dr. Smith", "3.5", "42", "[name]", "[", "]", "[a b]", "*word*", "**bold**", "***", "******", "* item",
    "- item", "\n* item", "\n- item", "\n  - item", "\n***\n", "\n******\n", "<<A title>>", "<<", ">>", "<< >>",
    "P.S. more", "P.P.S. more", "p. s. more", "Section 1", "SECTION 2", "Section3", "My answer is yes.",
    "My answer is maybe.", "Any other questions?", "Is there anything else I can help with?", '"', "'", ",", ".",
    "!", "?", ".\n", ". ", "? ", "! ", "\n", "\n\n", "\n\n\n", "{", "}", '{"a": 1}', "```json\n", "\n```",
    "Write a poem.", "привет мир", "Да, это так.", "snow-white", "well-known", "AT&T", "A,B", "A:B", "(OK)",
    "10:30PM", "cannot", "CANNOT", "WANNA go", "GIMME", "--", "CO-OP", "e.g. this", "p.m. now",
]  # fmt: skip
SENTENCES = [
    "The cat sat.", "Dr. Smith paid 3.50 dollars.", "Why not?", "He said \"Stop.\"", "(It rained, e.g. on Monday.)",
    "It began at 5 p.m. sharp.", "**Bold claims!**", "Is this - or that - the one?", "In 1999 all was well.",
    "* item one",
    "- item two.", "It took 7 days.", "\"Really?\" she asked.", "Visit NASA!", "No stop here", "<<A title>>",
    "I ate 3 and then some... more came.",
]  # fmt: skip
TEXTS = 300


def arguments_of(name, draw, text):
    """Random arguments of an instruction, as google/IFEval has them: the others are None."""
    filled = [part.split()[0] for part in text.split("\n\n") if part.strip()]
    number = draw.choice([len(filled) or 1, draw.randint(1, 4)])
    values = {
        "keywords": draw.sample(["cat", "sea", "hello", "nasa", "poem"], 2),
        "forbidden_words": draw.sample(["cat", "sea", "item", "snow"], 2),
        "keyword": draw.choice(["the", "item", "a", "hello"]),
        "letter": draw.choice("aeHSx"),
        "language": draw.choice(["en", "ru"]),
        "first_word": draw.choice([*filled, "hello"]).strip(",.?!'\"") or "the",
        "end_phrase": draw.choice(["Any other questions?", "Is there anything else I can help with?"]),
        "postscript_marker": draw.choice(["P.S.", "P.P.S", "Section"]),
        "section_spliter": draw.choice(["Section", "SECTION"]),
        "prompt_to_repeat": "Write a poem.",
        "num_words": draw.randint(1, 30),
        "num_sentences": draw.randint(1, 8),
        "let_frequency": draw.randint(1, 12),
        "capital_frequency": draw.randint(1, 8),
        "nth_paragraph": draw.randint(1, number),
        "num_paragraphs": number,
    }
    values |= dict.fromkeys(("relation", "let_relation", "capital_relation"), draw.choice(["less than", "at least"]))
    needed = [*inspect.signature(CHECKS[name]).parameters][1:]
    return {"num_words": None, **{each: values.get(each, draw.randint(1, 3)) for each in needed}}


def texts():
    draw = random.Random(0)
    made = [
        "".join(draw.choice(PIECES) + draw.choice([" ", " ", ""]) for _ in range(draw.randint(1, 25)))
        for _ in range(TEXTS)
    ]
    shaped = [f'"{text.strip()}"' for text in made[:20]] + [text.upper() for text in made[20:40]]
    shaped += [text.lower() for text in made[40:60]] + [f"Write a poem. {text}" for text in made[60:80]]
    shaped += [f"Sure:\n{text}\nAny other questions?" for text in made[80:100]] + [
        "",
        " \n",
        "{}",
        "```\n[1]\n```",
        "***",
        "*",
    ]
    return made + shaped + [good for _, _, good, _ in CASES] + [bad for *_, bad in CASES]


def prose():
    """Texts of whole sentences. Stops glued to the next word or standing alone are nltk's own business."""
    draw = random.Random(1)
    return [
        "".join(draw.choice(SENTENCES) + draw.choice([" ", " ", "\n", "\n\n"]) for _ in range(draw.randint(1, 12)))
        for _ in range(TEXTS)
    ]


@pytest.fixture
def theirs(monkeypatch, languages):
    """lm-eval's checks. nltk's trained sentence model is a download, so an untrained one stands in for it, which knows
    the abbreviations of the texts; langdetect is the fake of this file on both sides."""
    nltk = pytest.importorskip("nltk", reason="lm-eval is not installed")
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    frozen = ModuleType("immutabledict")
    frozen.immutabledict = dict
    monkeypatch.setitem(sys.modules, "immutabledict", frozen)
    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)
    parameters = PunktParameters()
    parameters.abbrev_types = {"dr", "e.g", "p.m"}
    sentences = PunktSentenceTokenizer(parameters)
    words = NLTKWordTokenizer()
    from lm_eval.tasks.ifeval import instructions, instructions_util, utils

    monkeypatch.setattr(instructions, "langdetect", languages)
    monkeypatch.setattr(instructions_util, "_get_sentence_tokenizer", lambda: sentences)
    monkeypatch.setattr(
        nltk, "word_tokenize", lambda text: [word for each in sentences.tokenize(text) for word in words.tokenize(each)]
    )
    return utils


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_verdict_is_that_of_lm_eval(name, theirs):
    draw = random.Random(name)
    verdicts = Counter()
    for text in prose() if name.endswith("sentences") else texts():
        arguments = arguments_of(name, draw, text)
        row = theirs.InputExample(0, [name], "Write a poem.", [arguments])
        for mode, check in (
            ("strict", theirs.test_instruction_following_strict),
            ("loose", theirs.test_instruction_following_loose),
        ):
            expected = check(row, text).follow_all_instructions
            assert compute_score(text, truth((name, arguments)), mode=mode)["accuracy"] == expected, (
                mode,
                arguments,
                text,
            )
            verdicts[expected] += 1
    assert min(verdicts[True], verdicts[False]) >= 10, verdicts
