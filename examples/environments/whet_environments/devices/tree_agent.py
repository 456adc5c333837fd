# SPDX-License-Identifier: Apache-2.0
"""The agent of the tree game: screenshot, state, decision, tap."""

from __future__ import annotations

import json
import re
from typing import Any

from whet_environments import rewards
from whet_environments.actions import Action, parse_action, write_action
from whet_environments.devices import layout as at
from whet_environments.devices.agent import Agent, Setup
from whet_environments.devices.backends import Question
from whet_environments.devices.layout import HEIGHT, WIDTH
from whet_environments.devices.reading import TreeScreen, TreeState, open_image, read_power, read_tree_game
from whet_environments.tree_game import ACTIONS, TreeGame

STEPS = 5  # a round, at most
PROMPTS = {
    "en": {
        "decide": (
            "This is a screenshot of a game in which you cut a tree to find equipment, and your power is to become as "
            "large as possible. If there is a dialog with equipment, add up its changes and answer "
            "<action>replace()</action> if the sum is above 0, else <action>decompose()</action>. If there is no "
            "dialog, hit the axe at the bottom: <action>click({x}, {y})</action>."
        ),
        "state": (
            "Which power does this screenshot show, and does it have a dialog with equipment? Answer in the form "
            "`power: NUMBER, dialog: yes or no`."
        ),
    },
    "zh": {
        "decide": (
            "这是砍树游戏的截图，目标是让妖力尽可能大。如果出现装备弹窗，请把各项属性变化相加：总和大于 0 时回答"  # noqa: RUF001
            "<action>replace()</action>，否则回答 <action>decompose()</action>。"  # noqa: RUF001
            "如果没有弹窗，请点击下方的斧子：<action>click({x}, {y})</action>。"  # noqa: RUF001
        ),
        "state": "截图中的妖力是多少？是否有装备弹窗？请按 `power: 数字, dialog: yes 或 no` 的格式回答。",  # noqa: RUF001
    },
}
DIALOG = re.compile(r"dialog\W{0,4}(yes|是)", re.IGNORECASE)
BUTTON_WORDS = ("替换", "分解", "replace", "decompose")


class TreeAgent(Agent):
    """Plays the tree game until all equipment is decided on, in at most five steps a round."""

    game = "tree-game"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.folder = "debug_screenshots/" if setup.debug else ""
        self._make_folder(setup.output / self.folder)
        self.decided, self.powers, self.source = 0, list[int | None](), ""

    def _play(self) -> None:
        self.wait_until_begun(read_tree_game)
        for step in range(1, STEPS * self.setup.rounds + 1):
            name = f"{self.folder}step_{step:03d}.png"
            png = self.screenshot(name)
            state = self.read_state(png)
            self._pay(state)
            if state.screen == "over" or self.decided == self.setup.rounds:
                return
            self._collect(state, step, name)
            answer, action = self._decide(state, png)
            power = "?" if state.power is None else state.power
            self.setup.say(f"step {step}: {state.screen}, power {power}: {action or 'no action'}")
            self.turns.append(
                {
                    "step": step,
                    "state": state.fields(step),
                    "power_from": self.source,
                    "answer": answer,
                    "action": str(action) if action else None,
                    "screenshot": name,
                }
            )
            self._act(state, action)
        self.powers.append(self.read_state(self.screenshot(f"{self.folder}final.png")).power)

    def _decide(self, state: TreeState, png: bytes) -> tuple[str | None, Action | None]:
        question = self._question(state, png)
        answer = self.ask(question)
        if answer is None:
            return None, None
        if self.setup.observe == "compact":
            return answer, ACTIONS.get(answer.strip()[:1])
        return answer, parse_action(answer)

    def _question(self, state: TreeState, png: bytes) -> Question:
        if self.setup.observe == "compact":
            return Question("decide", state.compact(), is_chat=False, max_tokens=1)
        if self.setup.observe == "words":
            return Question("decide", f"{TreeGame.rules}\n\n{state.words()}")
        x, y = self._axe()
        return Question("decide", PROMPTS[self.setup.lang]["decide"].format(x=x, y=y), png)

    def _axe(self) -> tuple[int, int]:
        """The axe in pixels of the screen."""
        width, height = self.size
        return round(at.AXE[0] * width / WIDTH), round(at.AXE[1] * height / HEIGHT)

    def _act(self, state: TreeState, action: Action | None) -> None:
        if action is None or action.name == "select":
            return
        if action.name == "click":
            x, y = action.arguments
            self.tap_pixel(x, y) if self.setup.observe == "image" else self.tap((x, y))
            return
        self.tap(at.REPLACE if action.name == "replace" else at.DECOMPOSE)
        self.decided += state.screen == "equipment_selection"

    def read_state(self, png: bytes) -> TreeState:
        """Reads the screen: the own page by its pixels, another one by OCR if pytesseract is installed, else by the
        model."""
        image = open_image(png)
        state = read_tree_game(image)
        self.source = "pixels"
        if state is not None:
            return state
        lines = ocr(image)
        self.source = "ocr"
        if lines is not None:
            text = " ".join(lines).lower()
            is_dialog = any(word in text for word in BUTTON_WORDS)
            return TreeState(_screen(is_dialog), read_power(lines))
        self.source = "model"
        answer = self.ask(Question("state", PROMPTS[self.setup.lang]["state"], png)) or ""
        return TreeState(_screen(bool(DIALOG.search(answer))), read_power(answer.splitlines()))

    def _pay(self, state: TreeState) -> None:
        """Gives the last turn the reward of its change of power."""
        self.powers.append(state.power)
        if self.turns:
            turn = self.turns[-1]
            found = {**turn["state"], "after": dict.fromkeys(("click", "replace", "decompose"), state.power)}
            scores = rewards.tree_game(write_text(turn), {"state": found})
            turn |= {"power_after": state.power, "reward": scores["score"], "right": scores["acc"] == 1.0}

    def _collect(self, state: TreeState, step: int, name: str) -> None:
        right = state.right_action
        if right and right.name == "click":
            right = Action("click", self._axe())
        row = {"prompt": f"{TreeGame.rules}\n\n{state.words()}", "answer": write_action(right) if right else None}
        self.collect({**row, "data_source": "tree_game", "state": state.fields(step)}, name)

    def _finish(self) -> dict[str, Any]:
        known = [power for power in self.powers if power is not None]
        decisions = [turn for turn in self.turns if turn["state"]["screen"] == "equipment_selection" and turn["action"]]
        gain = known[-1] - known[0] if known else None
        if self.setup.debug:
            keys = ("step", "action", "screenshot", "power_after", "reward")
            history = [{**{key: turn.get(key) for key in keys}, **turn["state"]} for turn in self.turns]
            text = json.dumps(history, indent=1, ensure_ascii=False)
            self._write(f"{self.folder}action_history.json", text.encode())
        self.setup.say(f"power {known[-1] if known else '?'}, a gain of {gain}, after {self.decided} decisions")
        return {
            "completed_rounds": self.decided,
            "steps": len(self.turns),
            "first_power": known[0] if known else None,
            "final_power": known[-1] if known else None,
            "gain": gain,
            "right_decisions": sum(bool(turn.get("right")) for turn in decisions),
        }


def write_text(turn: dict[str, Any]) -> str:
    """The action of a turn as the answer that a reward function reads."""
    return f"<action>{turn['action']}</action>" if turn["action"] else str(turn["answer"])


def ocr(image: Any) -> list[str] | None:
    """Returns the lines of text on the screen; None without pytesseract and its program."""
    try:
        import pytesseract
    except ImportError:
        return None
    try:
        languages = set(pytesseract.get_languages()) & {"chi_sim", "eng"}
        text = pytesseract.image_to_string(image, lang="+".join(sorted(languages)) or None, timeout=20)
    except (RuntimeError, OSError):  # its program is absent, or took too long
        return None
    return [line for line in text.splitlines() if line.strip()]


def _screen(is_dialog: bool) -> TreeScreen:
    return "equipment_selection" if is_dialog else "tree_cutting"


def rule(question: Question) -> str:
    """The answers of the rule `replace if the power rises`, which reads the pixels of the own page."""
    image = open_image(question.png) if question.png else None
    state = read_tree_game(image) if image else None
    if question.kind == "state":
        return f"power: {state.power if state else 'unknown'}, dialog: {'yes' if state and state.changes else 'no'}"
    action = state.right_action if state else None
    if image is None or action is None:
        return "I cannot read the screen."
    if action.name == "click":
        action = Action("click", (round(at.AXE[0] * image.width / WIDTH), round(at.AXE[1] * image.height / HEIGHT)))
    return f"screen {state.screen if state else ''}: {write_action(action)}"
