# SPDX-License-Identifier: Apache-2.0
"""The agent of the number game: screenshot, decision, tap, check of the colour, next round."""

from __future__ import annotations

import re
from typing import Any

from whet_environments import rewards
from whet_environments.actions import Action, parse_action, write_action
from whet_environments.devices.agent import Agent
from whet_environments.devices.backends import Question
from whet_environments.devices.digits import is_near, pixel
from whet_environments.devices.errors import DeviceError
from whet_environments.devices.layout import CARDS_X, CARDS_Y, NEXT
from whet_environments.devices.reading import NumberState, open_image, read_number_game
from whet_environments.number_game import NumberGame

RULES = f"{NumberGame.rules} Give the answer in a tag: <action>select(N)</action>."
NUM_TAPS = 3  # at one card, until its colour changes
TRIES = 2  # a round
PROMPTS = {
    "en": {
        "decide": (
            "This is a screenshot of a number game. One of three lamps is lit. Green asks for the largest of the three "
            "cards, red for the smallest, yellow for the middle one. Tell which lamp is lit and the three numbers from "
            "left to right, then answer with the place of the right card: <action>select(N)</action>, where N is "
            "0 (left), 1 (middle) or 2 (right)."
        ),
        "changed": (
            "This is a screenshot of a number game after a tap. Is one of the three cards green or red now, instead of "
            "purple? Answer yes or no."
        ),
        "score": "Which large number is in the pink box at the top of this screenshot? Answer with the number only.",
    },
    "zh": {
        "decide": (
            "这是一个数字选择游戏的截图。三盏灯中有一盏亮着：绿灯选最大的数字，红灯选最小的数字，黄灯选中间的数字。"  # noqa: RUF001
            "请先说出亮着的是哪盏灯，以及从左到右的三个数字，再给出应选卡片的位置：<action>select(N)</action>，"  # noqa: RUF001
            "其中 N 为 0（左）、1（中）或 2（右）。"  # noqa: RUF001
        ),
        "changed": "这是点击之后的游戏截图。三张数字卡片中，是否有一张由紫色变成了绿色或红色？请回答“是”或“否”。",  # noqa: RUF001
        "score": "截图上方粉色方框里的大数字是多少？只回答数字。",  # noqa: RUF001
    },
}
INDEX = re.compile(r"(?:index|索引|place|位置)\D{0,12}([0-2])\b", re.IGNORECASE)
YES = re.compile(r"\byes\b|是", re.IGNORECASE)
NO = re.compile(r"\bno\b|否|不是|没有", re.IGNORECASE)


def read_place(answer: str, state: NumberState | None, *, is_compact: bool = False) -> int | None:
    """Returns the place of the card in an answer: `select(N)`, a line such as "index: N", or the card itself in the
    compact encoding; None without one."""
    if is_compact:
        text = answer.strip()[:1]
        return state.cards.index(int(text)) if state and text.isdecimal() and int(text) in state.cards else None
    action = parse_action(answer)
    if action is not None:
        return action.arguments[0] if action.name == "select" and action.arguments[0] <= 2 else None
    found = INDEX.findall(answer)
    return int(found[-1]) if found else None


def is_yes(answer: str) -> bool:
    """Tells whether an answer is yes; "no" wins."""
    return bool(YES.search(answer)) and not NO.search(answer)


class NumberAgent(Agent):
    """Plays the number game: at most two tries a round, 20 for ten rounds."""

    game = "number-game"

    def _play(self) -> None:
        self.completed = self.attempts = 0
        self.wait_until_begun(read_number_game)
        while self.completed < self.setup.rounds and self.attempts < TRIES * self.setup.rounds:
            self.attempts += 1
            self.setup.say(f"round {self.completed + 1} of {self.setup.rounds}, try {self.attempts}")
            self.completed += self._play_round(self.completed + 1)
        if self.completed < self.setup.rounds:
            self.setup.say(
                f"{self.attempts} tries are used up; {self.completed} of {self.setup.rounds} rounds are played"
            )

    def _play_round(self, number: int) -> bool:
        """Plays one try of a round.  Returns whether it went through."""
        name = f"round_{number:02d}.png"
        png = self.screenshot(name)
        state = read_number_game(open_image(png))
        if state is not None and state.is_over:
            raise DeviceError(
                f"game on {self.controller.name}",
                f"over after round {state.round} of {state.rounds}",
                change=f"start the page again, with rounds={self.setup.rounds}",
            )
        if state is not None:
            self._collect(state, name)
        question = self._question(state, png)
        answer = self.ask(question) if question else None
        place = None if answer is None else read_place(answer, state, is_compact=self.setup.observe == "compact")
        self._note(number, state, answer, place)
        if place is None:
            self.setup.say(f"the answer has no card: {(answer or '')[:200]!r}")
            return False
        if not self._take(number, place, png):
            self.setup.say(f"no card changed its colour after {NUM_TAPS} taps")
            return False
        self.tap(NEXT)
        return True

    def _question(self, state: NumberState | None, png: bytes) -> Question | None:
        if self.setup.observe == "image":
            return Question("decide", PROMPTS[self.setup.lang]["decide"], png)
        if state is None:
            self.setup.say("the screen shows no number game that can be read; use --observe image")
            return None
        if self.setup.observe == "compact":
            return Question("decide", state.compact(), is_chat=False, max_tokens=1)
        return Question("decide", f"{RULES}\n\n{state.words()}")

    def _take(self, number: int, place: int, before: bytes) -> bool:
        """Taps a card until a card has another colour."""
        for tap in range(1, NUM_TAPS + 1):
            self.tap((CARDS_X[place], CARDS_Y))
            after = self.screenshot(f"round_{number:02d}_tap_{tap}.png")
            if self._is_changed(before, after):
                return True
        return False

    def _is_changed(self, before: bytes, after: bytes) -> bool:
        if self.setup.checks_by_model:
            answer = self.ask(Question("changed", PROMPTS[self.setup.lang]["changed"], after))
            return answer is not None and is_yes(answer)
        images = open_image(before), open_image(after)
        state = read_number_game(images[1])
        corners = [[pixel(image, x - 80, CARDS_Y) for image in images] for x in CARDS_X]
        return bool(state and state.taken is not None) or any(not is_near(*pair) for pair in corners)

    def _note(self, number: int, state: NumberState | None, answer: str | None, place: int | None) -> None:
        turn: dict[str, Any] = {"round": number, "try": self.attempts, "answer": answer, "place": place}
        if state is not None:
            text = answer or "" if place is None else write_action(Action("select", (place,)))
            scores = rewards.number_game(text, {"state": state.fields()})
            turn |= {"state": state.fields(), "right": place == state.right_place, "reward": scores["score"]}
        self.turns.append(turn)
        if place is not None:
            shown = "" if state is None else f", which is {'right' if turn['right'] else 'wrong'}"
            self.setup.say(f"takes card {place}{shown}")

    def _collect(self, state: NumberState, name: str) -> None:
        answer = write_action(Action("select", (state.right_place,)))
        row = {"prompt": f"{RULES}\n\n{state.words()}", "answer": answer, "data_source": "number_game"}
        self.collect({**row, "state": state.fields()}, name)

    def _finish(self) -> dict[str, Any]:
        png = self.screenshot("final.png")
        state = read_number_game(open_image(png))
        score = None if state is None else state.score
        if self.setup.observe == "image":
            answer = self.ask(Question("score", PROMPTS[self.setup.lang]["score"], png)) or ""
            found = re.search(r"-?\d+", answer)
            read = int(found[0]) if found else None
        else:
            read = score
        self.setup.say(f"score {read if score is None else score} after {self.completed} rounds")
        return {
            "completed_rounds": self.completed,
            "tries": self.attempts,
            "final_score": read,
            "score_on_screen": score,
            "right_cards": sum(turn.get("right", False) for turn in self.turns),
        }


def rule(question: Question) -> str:
    """The answers of a rule that reads the pixels of the own page."""
    state = read_number_game(open_image(question.png)) if question.png else None
    if state is None:
        return "I cannot read the screen."
    if question.kind == "changed":
        return "no" if state.taken is None else "yes"
    if question.kind == "score":
        return str(state.score)
    if state.is_over:
        return "The game is over."
    return f"lamp {state.lamp}, cards {state.cards}: {write_action(Action('select', (state.right_place,)))}"
