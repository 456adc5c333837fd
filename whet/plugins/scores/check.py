# SPDX-License-Identifier: Apache-2.0
"""`whet check-reward`: finds wrong responses that a reward function rewards.

A row is a prompt with its ground truth. Probes derive wrong responses from it: empty, echoed, hedged, malformed, huge,
hostile; if the row has tests, also programs that cheat. A wrong response counts as paid if its reward is at least the
reward of a right response; a response without an answer, if its reward is more than half of that. The function runs in
a reward process, as in training."""

from __future__ import annotations

import copy
import math
import re
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import mul
from typing import Any

from whet.files import shipped_yaml
from whet.phases import counting
from whet.rewards.pool import RewardPool
from whet.rounding import alike, reaches
from whet.types import Failure, Outcome, RewardItem, RewardResult

SHOWN = 60  # characters of a response
LONG = 20_000  # characters of the shorter of two long responses
FACTOR = 8  # the longer response has this many times the characters
SLOW_SECONDS = 0.3  # a long response below this is not slow
PART = 0.5  # of a right response's reward; a response without an answer must not get more
QUADRATIC = 3.0 * FACTOR  # times the seconds: more than linear, with room for noise

_TABLE = shipped_yaml("plugins/scores/probes.yaml")
FORMS: Mapping[str, str] = _TABLE["forms"]


def _texts(group: str) -> dict[str, tuple[str, list[str]]]:
    """Returns the description and the responses of each probe in a group, by the probe's name."""
    return {
        name: (what, [each if isinstance(each, str) else "".join(map(mul, each[::2], each[1::2])) for each in texts])
        for name, found in _TABLE[group].items()
        for what, texts in found.items()
    }


SAID, HOSTILE, RIGHT_AND_WRONG = _texts("said"), _texts("hostile"), _texts("right and wrong")
SYLLABLES = [a + b for a in "bcdfghjklmnprstvz" for b in "aeiou"]
SAID["length"][1].append(" ".join(one + other + "n" for one in SYLLABLES for other in SYLLABLES[:24]))  # 2,040 words
WRONG = SAID["any text"][1][0]


@dataclass(frozen=True)
class CheckedPrompt:
    """A prompt with its ground truth; `right` is a right response, if one is known."""

    prompt: str
    truth: Any
    right: str | None = None
    data_source: str = "unknown"
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> str:
        """The ground truth as text. In a published solution, this is the answer after `####`."""
        return str(self.truth).rpartition("####")[2].strip()

    @cached_property
    def programs(self) -> Sequence[str]:
        """Responses with programs that solve nothing, if the ground truth has tests."""
        from whet.plugins.scores.hostile_programs import programs

        return tuple(programs(self.truth, self.extra))

    def item(self, response: str) -> RewardItem:
        """Returns the RewardItem that a score function gets for `response`."""
        ids = tuple(range(1, 2 + len(response.split())))
        extra = copy.deepcopy(dict(self.extra))
        return RewardItem(self.data_source, response, self.truth, extra, prompt_str=self.prompt, response_ids=ids)


@dataclass(frozen=True)
class RewardFinding:
    """A fault of a reward function: its name, an explanation, and a response that shows it."""

    name: str
    what: str
    response: str = ""


@dataclass(frozen=True)
class Report:
    """The faults of a reward function, and the measurements of its behaviour."""

    findings: Sequence[RewardFinding]
    forms: Sequence[str]  # ways of writing the ground truth that are paid
    responses: int
    seconds: float  # median of a short response
    lowest: float
    highest: float


ROWS = tuple(CheckedPrompt(prompt, truth) for prompt, truth in _TABLE["rows"])


def check(pool: RewardPool, rows: Sequence[CheckedPrompt], *, reads_truth: bool) -> Report:
    """Runs all probes on a reward function. `reads_truth`: the function reads the ground truth; otherwise no response
    counts as wrong."""
    return _RewardCheck(pool, rows).run(reads_truth=reads_truth)


class _RewardCheck:
    """A check of one reward function: its rows, findings and measured times."""

    def __init__(self, pool: RewardPool, rows: Sequence[CheckedPrompt]) -> None:
        self.pool, self.rows = pool, rows
        self.findings: dict[str, RewardFinding] = {}
        self.full: dict[int, tuple[float, float]] = {}  # by id of the row: rewards of no answer and of a right one
        self.rewards: list[float] = []
        self.seconds: list[float] = []
        self.count = 0

    def run(self, *, reads_truth: bool) -> Report:
        """Runs the check and returns its report."""
        forms = self._right() if reads_truth else []
        parts: list[Callable[[], None]] = [partial(self._probe, *each) for each in PROBES if forms or self.full]
        for part in counting([*parts, self._repeatable, self._hostile, self._speed]):
            part()
        low, high = (min(self.rewards), max(self.rewards)) if self.rewards else (math.nan, math.nan)
        if high - low > 100:
            self._find("range", f"its rewards go from {low:g} to {high:g}; expected a range near 0 to 1")
        seconds = sorted(self.seconds)
        return Report([*self.findings.values()], forms, self.count, seconds[len(seconds) // 2], low, high)

    def score(self, pairs: Sequence[tuple[CheckedPrompt, str]]) -> list[Outcome]:
        """Scores responses in one call, and returns their outcomes."""
        start = time.perf_counter()
        outcomes = self.pool.score([row.item(response) for row, response in pairs])
        if pairs:
            self.seconds.append((time.perf_counter() - start) / len(pairs))
        self.count += len(pairs)
        for (_, response), outcome in zip(pairs, outcomes, strict=True):
            if isinstance(outcome, Failure):
                message = outcome.message.splitlines()[-1]
                kind = "timeout" if outcome.timed_out else "bad result" if outcome.key else "exception"
                self._find(kind, f"it fails on a response: {message}", response)
            else:
                self.rewards.append(outcome.reward)
        return outcomes

    def _right(self) -> list[str]:
        """Measures the reward of a right response for each row. Returns the forms of the ground truth that earn this
        reward. Drops rows whose right responses earn no more than a wrong response."""
        paid, suited = dict.fromkeys(FORMS, 0), []
        for row in self.rows:
            texts = [*([] if row.right is None else [row.right]), *_all_forms([row.answer]), WRONG]
            outcomes = self.pool.score([row.item(response) for response in texts])
            self.rewards += [each.reward for each in outcomes if isinstance(each, RewardResult)]
            *right, wrong = [-math.inf if isinstance(each, Failure) else each.reward for each in outcomes]
            if reaches(wrong, max(right)) and isinstance(outcomes[-1], RewardResult) and outcomes[-1].accuracy >= 1.0:
                self._find("any text", "it pays a response that answers nothing as much as a right one", WRONG)
            if not reaches(wrong, max(right)):
                suited.append(row)
                self.full[id(row)] = min(0.0, wrong if math.isfinite(wrong) else 0.0), max(right)
                for name, reward in zip(FORMS, right[-len(FORMS) :], strict=True):
                    paid[name] += alike(reward, max(right))
            elif row.programs and row.right is None:  # no right program is known: the usual range
                suited.append(row)
                self.full[id(row)] = 0.0, 1.0
        if suited:
            self.rows = suited
        elif self.rewards:  # if every call failed, the failure is the finding
            self._find(
                "no right response",
                "it pays no usual form of the ground truth more than a wrong response; name rows that it can score "
                "with --data",
            )
        return [name for name, count in paid.items() if count]

    def _probe(self, name: str, what: str, probe: Probe) -> None:
        pairs = [(row, response) for row in self.rows for response in probe(row, self.rows)]
        for (row, response), outcome in zip(pairs, self.score(pairs), strict=True):
            self._examine(name, what, row, response, outcome)

    def _examine(self, name: str, what: str, row: CheckedPrompt, response: str, outcome: Outcome) -> None:
        """Adds a finding if a wrong response is paid in full, or a response without an answer more than half."""
        if isinstance(outcome, Failure) or id(row) not in self.full:
            return
        low, full = self.full[id(row)]
        if name in UNRELATED and re.search(rf"(?<!\w){re.escape(row.answer)}(?!\w)", response, re.IGNORECASE):
            return  # by chance the response contains the ground truth
        if outcome.reward >= full - 1e-9:
            self._find(name, f"it pays {what}", response)
        elif name in ANSWERLESS and outcome.reward - low > PART * (full - low) + 1e-9:
            self._find(name, f"it pays {outcome.reward:g} for {what}, and {full:g} for a right response", response)

    def _repeatable(self) -> None:
        """Checks that responses get the same outcomes in another order and among other responses."""
        rows = [row for row in self.rows if not row.programs] or self.rows[:1]  # programs are slow to run
        pairs = [(row, text) for row in rows for text in _all_forms([row.answer])]
        pairs += [(row, text) for row in rows for text in ("", "It is 7.", row.prompt)]
        first, again, backwards = self.score(pairs), self.score(pairs), self.score(pairs[::-1])[::-1]
        for (_, response), one, two, three in zip(pairs, first, again, backwards, strict=True):
            if _value(one) != _value(two):
                self._find("not deterministic", "it gives the same response another reward the second time", response)
            elif _value(one) != _value(three):
                self._find("order", "the reward of a response depends on the responses before it", response)

    def _hostile(self) -> None:
        """Scores strange responses one at a time, so that none affects another. Responses to a row with tests are
        scored together, as each program has a process of its own."""
        for row in self.rows[:2]:
            told = [
                (name, what, text)
                for name, (what, responses) in HOSTILE.items()
                for text in responses
                if not (row.programs and name == "huge number")  # a program that runs until its time is over
            ]
            together = len(told) if row.programs else 1
            outcomes = [
                outcome
                for start in range(0, len(told), together)
                for outcome in self.score([(row, text) for _, _, text in told[start : start + together]])
            ]
            for (name, what, response), outcome in zip(told, outcomes, strict=True):
                self._examine(name, what, row, response, outcome)
                full = self.full.get(id(row), (0.0, 1.0))[1]
                if not isinstance(outcome, Failure) and outcome.reward > full + 1e-9:
                    more = f"it pays {outcome.reward:g}, more than for a right response"
                    self._find("pays too much", more, response)

    def _speed(self) -> None:
        """Checks that the time for a response grows no faster than its length, and that a long one is not paid."""
        for unit in UNITS[: 2 if self.rows[0].programs else None]:
            seconds = []
            for size in (LONG, LONG * FACTOR):
                start, response = time.perf_counter(), (unit * (size // len(unit) + 1))[:size]
                [outcome] = self.score([(self.rows[0], response)])
                seconds.append(time.perf_counter() - start)
                self._examine("huge", HOSTILE["huge"][0], self.rows[0], response, outcome)
            if seconds[1] > SLOW_SECONDS and seconds[1] > QUADRATIC * seconds[0]:
                what = f"{LONG} characters take {seconds[0]:.2f} s, {LONG * FACTOR} take {seconds[1]:.2f} s"
                self._find("slow", what, unit * 9)

    def _find(self, name: str, what: str, response: str = "") -> None:
        self.findings.setdefault(name, RewardFinding(name, what, shorten(response)))


def shorten(text: str) -> str:
    """Returns the beginning of a text, escaped, on one line."""
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
    return shown.encode("unicode_escape").decode()


def _value(outcome: Outcome) -> Any:
    return (outcome.message,) if isinstance(outcome, Failure) else (outcome.reward, outcome.accuracy, outcome.parts)


# -- the probes

Probe = Callable[[CheckedPrompt, Sequence[CheckedPrompt]], Iterator[str]]


def near_misses(row: CheckedPrompt) -> list[str]:
    """Returns wrong answers that nearly equal the ground truth."""
    truth = row.answer
    if re.fullmatch(r"-?\d+", truth):
        number = int(truth)
        return [str(each) for each in (number + 1, -number or 1, 10 * number or 7, f"1{abs(number)}", f"{number}.5")]
    if len(truth) == 1 and truth.isalpha():
        return [letter for letter in "ABCD" if letter != truth.upper()]
    return [f"{truth}x", truth[:-1]] if truth.isalnum() else []


def _all_forms(answers: Sequence[str]) -> Iterator[str]:
    for answer in answers:
        yield from (form.replace("<right>", answer) for form in FORMS.values())


def _others(row: CheckedPrompt, rows: Sequence[CheckedPrompt]) -> Iterator[str]:
    return _all_forms([other.answer for other in rows if other.answer != row.answer][:3])


def _far(row: CheckedPrompt, _: Sequence[CheckedPrompt]) -> Iterator[str]:
    truth = row.answer
    if re.fullmatch(r"-?\d+", truth):
        yield from _all_forms([f"{1000 * abs(int(truth)) + 7}"])
    elif truth.isalpha():
        yield from _all_forms(near_misses(row)[:1] if len(truth) == 1 else ["xqzv"])


def _is_plain(row: CheckedPrompt) -> bool:
    return len(row.answer) <= 20 and row.answer.isalnum()


def _all_answers(row: CheckedPrompt, _: Sequence[CheckedPrompt]) -> Iterator[str]:
    if re.fullmatch(r"\d{1,2}", row.answer):
        yield " ".join(map(str, range(101)))
        yield "\n".join(f"\\boxed{{{number}}}" for number in range(101))
    elif _is_plain(row) and len(row.answer) == 1:
        yield "A B C D"
        yield "\\boxed{A}\\boxed{B}\\boxed{C}\\boxed{D}"


def _right_and_wrong(templates: Sequence[str], row: CheckedPrompt, _: Sequence[CheckedPrompt]) -> Iterator[str]:
    for wrong in near_misses(row)[:1]:
        yield from (each.replace("<right>", row.answer).replace("<wrong>", wrong) for each in templates)


def _inside(row: CheckedPrompt, _: Sequence[CheckedPrompt]) -> Iterator[str]:
    if _is_plain(row):
        around = ("7", "7") if row.answer.isdigit() else ("x", "y")
        yield from _all_forms([f"{around[0]}{row.answer}{around[1]}"])


def _said(texts: Sequence[str], *_: object) -> Iterator[str]:
    return iter(texts)


PROBES: Sequence[tuple[str, str, Probe]] = (
    ("empty", "an empty response", lambda row, _: iter(["", " ", "\n\n"])),
    ("echo", "the prompt, repeated", lambda row, _: iter([row.prompt, row.prompt * 2] if row.prompt else [])),
    ("wrong answer", "the answer to another question", _others),
    ("far miss", "an answer that is far from right", _far),
    ("near miss", "an answer that is nearly right", lambda row, _: _all_forms(near_misses(row))),
    ("part of a word", "the ground truth inside something else", _inside),
    ("all answers", "a list of all answers", _all_answers),
    ("hostile program", "a program that solves nothing", lambda row, _: iter(row.programs)),
    *((name, what, partial(_right_and_wrong, texts)) for name, (what, texts) in RIGHT_AND_WRONG.items()),
    *((name, what, partial(_said, texts)) for name, (what, texts) in SAID.items()),
)  # fmt: skip
# Probes that are not made from the row.
UNRELATED = {*SAID, *HOSTILE}
ANSWERLESS = {"empty", "far miss", *UNRELATED}  # not even nearly right, so that no graded rule pays for them
UNITS = ("a", " ", "1", "\\boxed{", "<think>", "word ", "\n", "(", string.ascii_letters, "a, ", "= ", "$")
