# SPDX-License-Identifier: Apache-2.0
"""The page of `whet view` in Chromium."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.viewer.conftest import DIGEST, HOSTILE, record, two_agents, write_lines
from whet.plugins.viewer.server import open_server
from whet.tracking.runs import write_state

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; `make chromium` installs it"),
]
WAIT = 20_000  # milliseconds


@pytest.fixture
def page(folder: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page of the folder's runs, or of one run. No request leaves the machine, nothing is an error."""
    server = open_server(folder / getattr(request, "param", ""))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    errors: list[str] = []
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu", "--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1300, "height": 800}, color_scheme="light")
        opened.set_default_timeout(WAIT)
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        own = f"http://127.0.0.1:{server.server_address[1]}/"
        opened.on("request", lambda sent: None if sent.url.startswith(own) else errors.append(sent.url))
        opened.goto(own)
        opened.wait_for_selector("figure canvas")
        yield opened
        browser.close()
    server.shutdown()
    server.server_close()
    assert not errors


def texts(page: Any, selector: str) -> list[str]:
    return [each.strip() for each in page.locator(selector).all_inner_texts()]


def open_trajectory(page: Any, step: int, line: int, kind: str = "step", run: str = "one") -> None:
    page.evaluate(f"location.hash = 'tab=trajectories&run={run}&kind={kind}&step={step}&line={line}'")
    page.wait_for_selector(".detail .title")


def test_curves_follow_a_running_run_and_lead_to_trajectories(page: Any, folder: Path) -> None:
    assert texts(page, ".run .name") == ["deep/two", "one"]
    assert texts(page, "figcaption b") == ["critic/score/mean", "sft/loss"]
    assert page.locator('[data-metric="critic/score/mean"] .values').inner_text() == "0.500"
    with (folder / "one/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "critic/score/mean": 0.875}\n')
    sync_api.expect(page.locator('[data-metric="critic/score/mean"] .values')).to_have_text("0.875")
    assert page.locator(".run", has_text="one").locator(".num").inner_text() == "3/9"
    over = page.locator('[data-metric="critic/score/mean"] .u-over')
    box = over.bounding_box()
    over.click(position={"x": 3, "y": box["height"] - 3})
    page.wait_for_selector(".detail .title")
    assert page.locator("#step").input_value() == "1"


@pytest.mark.parametrize("width", [360, 700])
def test_nothing_is_cut_off_on_a_narrow_screen(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    for hash_ in (
        "tab=curves",
        "tab=trajectories&run=one&kind=step&step=1&line=0",
        "tab=time&run=one",
        "tab=config&run=one",
    ):
        page.evaluate(f"location.hash = '{hash_}'")
        page.wait_for_timeout(300)
        page.reload()
        page.wait_for_selector("#main > *")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, hash_
        assert page.locator(".run", has_text="one").is_visible()


def test_without_tokens_the_page_says_how_to_keep_them(page: Any) -> None:
    open_trajectory(page, step=2, line=0)
    assert texts(page, ".views .dim") == ["no tokens of this step; of others, such as 1"]
    open_trajectory(page, step=1, line=2)
    assert texts(page, ".views .dim") == []


def test_a_constant_is_in_the_middle_of_its_chart(page: Any, folder: Path) -> None:
    write_lines(folder / "flat/metrics.jsonl", [{"step": s, "reward/accuracy": 0.0} for s in (1, 2, 3)])
    page.reload()
    page.wait_for_selector('[data-metric="reward/accuracy"] canvas')
    over = page.locator('[data-metric="reward/accuracy"] .u-over')
    box = over.bounding_box()
    over.hover(position={"x": box["width"] / 2, "y": 5})
    point = page.locator('[data-metric="reward/accuracy"] .u-cursor-pt').first.bounding_box()
    assert abs(point["y"] + point["height"] / 2 - box["y"] - box["height"] / 2) < 2
    given = "limits(0, 0), limits(-5, -5), limits(4, 4, true), limits(0, 1)"
    ends = page.evaluate(f'import("/static/charts.js").then(({{ limits }}) => [{given}])')
    assert ends == [[-1, 1], [-5.5, -4.5], [2, 8], page.evaluate("uPlot.rangeNum(0, 1, 0.1, true)")]


def test_chosen_metrics_smoothing_and_log_scale_are_kept(page: Any) -> None:
    page.locator("summary", has_text="time").click()
    page.get_by_label("rollout", exact=True).check()
    page.wait_for_selector('[data-metric="time/rollout"] canvas')
    page.get_by_label("log scale").check()
    page.get_by_label("smoothing").fill("0.5")
    page.reload()
    page.wait_for_selector('[data-metric="time/rollout"] canvas')
    assert page.get_by_label("log scale").is_checked() and page.get_by_label("smoothing").input_value() == "0.5"


def test_tokens_are_coloured_by_the_chosen_column(page: Any) -> None:
    open_trajectory(page, 1, 2)
    page.wait_for_selector(".tokens span")
    spans = page.locator(".tokens span")
    assert texts(page, ".tokens span") == ["lo", "ok", "it", "is", "four"]
    strength = "spans => spans.map(each => each.style.getPropertyValue('--strength'))"
    # Log-probs -1, -2, -0.5 against the largest, 2; full colour is 70 %. What was read has none.
    assert spans.evaluate_all(strength) == ["35%", "70%", "", "", "18%"]
    assert texts(page, ".legend .num") == ["-2", "0"]
    page.locator("#column").select_option("gap")  # trainer less sampler: -0.5, 0, and 0.25
    assert spans.evaluate_all(strength) == ["70%", "0%", "", "", "35%"]
    kinds = spans.evaluate_all("spans => spans.map(each => each.className)")
    assert kinds == ["below", "untrained above", "read", "read", "above"]
    page.locator("#column").select_option("who")
    assert texts(page, ".legend span") == ["policy", "tool"]
    page.locator("#column").select_option("policy_version")
    assert texts(page, ".legend span") == ["3", "4"]
    spans.first.hover()
    assert re.search(
        r"token 1 of 5 · turn 1.*log-prob \(sampler\)\s*-1\b", page.locator("#tip").inner_text(), re.DOTALL
    )


def test_turns_show_tools_and_images_that_the_run_keeps(page: Any) -> None:
    open_trajectory(page, 1, 2)
    page.keyboard.press("v")
    page.wait_for_selector(".block.tool img")
    assert texts(page, ".block header") == ["prompt", "turn 1", "tool", "turn 2 reward 1", "user"]
    assert page.locator(".block.tool img").get_attribute("src").endswith(DIGEST)
    sync_api.expect(page.locator(".block.tool img")).to_have_js_property("naturalWidth", 4)


@pytest.mark.parametrize("page", ["one"], indirect=True)
def test_images_of_a_run_whose_own_folder_is_viewed(page: Any) -> None:
    open_trajectory(page, 1, 2, run=".")
    page.keyboard.press("v")
    sync_api.expect(page.locator(".block.tool img")).to_have_js_property("naturalWidth", 4)


def test_text_of_a_model_is_text(page: Any) -> None:
    open_trajectory(page, 2, 0)
    assert page.locator(".block.policy .text").inner_text() == HOSTILE
    assert page.title() == "whet view" and page.locator("main script").count() == 0


def test_failures_and_filtered_groups_say_why(page: Any) -> None:
    open_trajectory(page, 2, 2)
    assert page.locator(".failure").inner_text() == "tool: it broke"
    page.locator("#show").select_option("failed")
    sync_api.expect(page.locator(".count")).to_have_text("1 trajectory")
    page.locator("#show").select_option("all")
    page.locator("#kind").select_option("dropped")
    page.wait_for_selector(".note")
    assert page.locator(".note").inner_text() == "Filtered out by dapo."


def test_the_error_of_a_failed_run_stands_above_it(page: Any, folder: Path) -> None:
    banner = page.locator("#ended")
    page.locator(".run", has_text="one").click()
    sync_api.expect(banner).to_be_hidden()
    write_state(folder / "one", "failed", 9, RuntimeError(f"rank 3 is out of memory {HOSTILE}"))
    told = f"one: failed after step 2\nRuntimeError: rank 3 is out of memory {HOSTILE}"
    sync_api.expect(banner).to_be_visible()
    assert banner.inner_text() == told and page.title() == "whet view"
    assert page.locator(".run", has_text="one").locator(".ended").get_attribute("title") == told.split("\n")[1]
    page.locator(".run", has_text="two").click()
    sync_api.expect(banner).to_be_hidden()


def test_agents_and_players_are_named(page: Any, folder: Path) -> None:
    asked, rows = two_agents()
    write_lines(folder / "one/rollouts/step_000003.jsonl", [asked])
    write_lines(folder / "one/tokens/step_000003.jsonl", rows)
    page.wait_for_selector("figure canvas")
    page.locator(".run", has_text="one").click()
    page.reload()
    open_trajectory(page, 3, 0)
    page.wait_for_selector(".tokens span")
    assert texts(page, ".row .agents") == ["solver, checker"]
    assert dict(zip(texts(page, "dt"), texts(page, "dd"), strict=True))["agents"] == "solver, checker"
    assert texts(page, ".tokenview h4") == ["row 1 of 2 · solver", "row 2 of 2 · solver · checker"]
    page.locator("#column").select_option("who")
    assert texts(page, ".legend span") == ["policy", "tool"]
    page.keyboard.press("v")
    page.wait_for_selector(".block")
    assert texts(page, ".block.policy header") == [
        "turn 1 · solver",
        "turn 2 · checker · solver",
        "turn 3 · solver reward 1",
    ]


def test_trajectories_of_two_runs_stand_beside_each_other(page: Any, folder: Path) -> None:
    theirs = [
        record("0:7:0", 0.25, "eleven"),
        record("0:7:1", 0.75, "six"),
        record("0:8:1", response="no", prompt="1+1="),
    ]
    write_lines(folder / "deep/two/rollouts/step_000001.jsonl", theirs)
    page.reload()
    open_trajectory(page, 1, 1)
    page.locator("#beside").select_option("deep/two")
    page.wait_for_selector(".pair")
    assert texts(page, ".detail h3") == ["0:0:1", "0:7:1"]  # the second of its group in both
    page.keyboard.press("v")
    assert texts(page, ".pair .block.policy .text") == ["five", "six"]
    page.reload()  # the address has it
    page.wait_for_selector(".pair")
    open_trajectory(page, 2, 0)
    page.evaluate("location.hash += '&beside=deep/two'")
    page.wait_for_selector(".pair .empty")
    assert "no trajectory of this prompt" in page.locator(".pair .empty").inner_text()
    page.locator("#beside").select_option("")
    sync_api.expect(page.locator(".pair")).to_have_count(0)


def test_keys_move_find_and_explain(page: Any) -> None:
    page.keyboard.press("2")
    page.locator(".run", has_text="one").click()
    page.wait_for_selector(".detail .title")
    title = page.locator(".detail h3")
    sync_api.expect(title).to_have_text("0:2:0")  # of the newest step
    page.keyboard.press("ArrowLeft")
    sync_api.expect(title).to_have_text("0:0:0")
    page.keyboard.press("ArrowDown")
    sync_api.expect(title).to_have_text("0:0:1")
    page.keyboard.press("[")
    sync_api.expect(title).to_have_text("0:0:0")
    page.keyboard.press("/")
    page.keyboard.type("five")
    page.keyboard.press("Enter")
    sync_api.expect(title).to_have_text("0:0:1")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible() and "within the group" in page.locator("#keys").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("3")
    page.wait_for_selector(".times")
    assert texts(page, ".times td:first-child") == ["rollout", "rest of the step"]
    page.keyboard.press("4")
    page.wait_for_selector("pre.raw")
    page.go_back()
    page.wait_for_selector(".times")


def test_dark_and_light_follow_the_system_until_one_is_chosen(page: Any) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(background)
    assert light != dark
    page.keyboard.press("t")
    assert page.evaluate(background) == light
    page.reload()
    page.wait_for_selector("figure canvas")
    assert page.evaluate(background) == light


def test_a_list_of_thousands_has_few_elements(page: Any, folder: Path) -> None:
    write_lines(folder / "one/rollouts/step_000003.jsonl", (record(f"0:{i // 8}:{i % 8}") for i in range(5000)))
    open_trajectory(page, 2, 0)
    page.wait_for_selector('#step option[value="3"]', state="attached")
    open_trajectory(page, 3, 4321)
    sync_api.expect(page.locator(".count")).to_have_text("5,000 trajectories")
    sync_api.expect(page.locator('.row[aria-selected="true"]')).to_be_visible()
    sync_api.expect(page.locator(".detail h3")).to_have_text(f"0:{4321 // 8}:{4321 % 8}")
    assert page.locator(".row").count() < 40
    page.locator(".list").evaluate("list => list.scrollTop = list.scrollHeight")
    sync_api.expect(page.locator(".row").last).to_contain_text("2+2=")
