# SPDX-License-Identifier: Apache-2.0
"""`whet play`: agents that play games on a device."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.errors import ConfigError, StorageError
from whet.options import NonNegative, fits, words as describe
from whet_environments.devices import number_agent, tree_agent
from whet_environments.devices.adb_server import AdbServer
from whet_environments.devices.agent import Agent, Setup
from whet_environments.devices.backends import CALL_SECONDS, TEMPERATURE, Question, check_backend, make_backend
from whet_environments.devices.controllers import (
    CONTROLLERS,
    AdbController,
    Controller,
    ScreenController,
    check_controller,
    make_screen,
)
from whet_environments.devices.errors import check_pillow
from whet_environments.devices.page_server import FILES, PageServer

AGENTS: dict[str, tuple[type[Agent], Callable[[Question], str]]] = {
    "number-game": (number_agent.NumberAgent, number_agent.rule),
    "tree-game": (tree_agent.TreeAgent, tree_agent.rule),
}
SETTLE_SECONDS = {"adb": 1.0, "chromium": 0.05, "drawn": 0.0}
OBSERVE = ("image", "words", "compact")
CHECKS = ("model", "pixels")
NO_PAGE = "none"
RUNS = Path("runs/play")

app = typer.Typer(
    help="Let a model play a game on a phone, in Chromium, or on a drawn screen.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def add(game: str) -> None:
    """Adds the command of a game."""

    def command(
        context: typer.Context,
        controller: Annotated[str, typer.Option(help="adb, chromium or drawn")] = "chromium",
        serial: Annotated[str | None, typer.Option(help="device as `adb devices` names it, or ADDRESS:PORT")] = None,
        backend: Annotated[
            str, typer.Option(help="openai, ollama, or scripted: a rule that reads the pixels")
        ] = "openai",
        url: Annotated[str | None, typer.Option(help="address of the model server")] = None,
        model: Annotated[str | None, typer.Option(help="name of the model on its server")] = None,
        observe: Annotated[
            str, typer.Option(help="image: a screenshot; words, compact: the text game's state, read from the pixels")
        ] = "image",
        check: Annotated[
            str | None, typer.Option(help="model or pixels: tells whether a tap changed a colour; unset: as --observe")
        ] = None,
        page: Annotated[
            str | None,
            typer.Option(help="URL, activity or package to start; none: the screen as it is; unset: the own page"),
        ] = None,
        browser: Annotated[str | None, typer.Option(help="program of Chromium; unset: from the PATH")] = None,
        rounds: Annotated[int, typer.Option(min=1, max=99, help="rounds of a game")] = 10,
        seed: Annotated[int, typer.Option(min=0, help="seed of the own page")] = 0,
        games: Annotated[int, typer.Option(min=1, help="games, with the seeds that follow")] = 1,
        lang: Annotated[str, typer.Option(help="language of page and questions: en or zh")] = "en",
        temperature: Annotated[float, typer.Option(min=0, help="temperature of sampling")] = TEMPERATURE,
        call_seconds: Annotated[float, typer.Option(min=0.1, help="deadline of a call of the model")] = CALL_SECONDS,
        settle: Annotated[
            float | None, typer.Option(min=0, help="seconds from a tap to the screenshot; unset: by controller")
        ] = None,
        output: Annotated[Path | None, typer.Option(help="folder of screenshots and results")] = None,
        collect: Annotated[Path | None, typer.Option(help="JSONL file that gets a labelled row for each turn")] = None,
        debug: Annotated[bool, typer.Option("--debug", help="print raw answers and the paths of screenshots")] = False,
    ) -> None:
        for each in range(games):
            folder = output and (output if games == 1 else output / f"seed_{seed + each}")
            play_game(game, **{**context.params, "seed": seed + each, "output": folder})

    command.__doc__ = f"Play the {game.replace('-', ' ')}; screenshots and result_*.json are always written."
    app.command(game)(command)


def play_game(game: str, **options: Any) -> dict[str, Any]:
    """Plays one game with the options of the command.  Returns the result.

    Raises: ConfigError on an option, DeviceError, BackendError."""
    controller, backend = options["controller"], options["backend"]
    check_controller(controller)
    check_backend(backend)
    observe = _chosen("--observe", options["observe"], OBSERVE)
    check = _chosen("--check", options["check"] or ("model" if observe == "image" else "pixels"), CHECKS)
    lang, page = _chosen("--lang", options["lang"], ("en", "zh")), options["page"]
    if options["serial"] and controller != "adb":
        raise ConfigError(
            "--serial", options["serial"], f"none with --controller {controller}", "remove it, or use --controller adb"
        )
    _check_browser(options["browser"], "--controller", controller)
    _check_scripted(backend, {**options, "observe": None if observe == "image" else observe})
    for option in ("temperature", "call_seconds", "settle"):
        if options[option] is not None and not fits(options[option], NonNegative):
            raise ConfigError(f"--{option.replace('_', '-')}", options[option], describe(NonNegative))
    check_pillow()
    kind, rule = AGENTS[game]
    brain = make_backend(
        backend,
        rule,
        url=options["url"],
        model=options["model"],
        temperature=options["temperature"],
        seconds=options["call_seconds"],
        api_key=os.environ.get("OPENAI_API_KEY", ""),
    )
    seed, rounds = options["seed"], options["rounds"]
    settle = SETTLE_SECONDS[controller] if options["settle"] is None else options["settle"]
    with ExitStack() as stack:
        server = stack.enter_context(PageServer())
        device = open_device(controller, game, server, page, options["serial"], seed, rounds, lang, options["browser"])
        stack.enter_context(closing(device))
        setup = Setup(
            device,
            brain,
            options["output"] or new_folder(f"{game}-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{seed}"),
            rounds,
            observe,  # type: ignore[arg-type]
            checks_by_model=check == "model",
            settle_seconds=settle,
            is_own_page=page is None,
            lang=lang,
            debug=options["debug"],
            collect=options["collect"],
            say=typer.echo,
            notes={"controller": controller, "seed": seed, "page": page},
        )
        agent = kind(setup)
        try:
            return agent.play()
        finally:  # also after an error or Ctrl-C
            if agent.result_file:
                typer.echo(f"result: {agent.result_file}")


def new_folder(name: str, parent: Path = RUNS) -> Path:
    """Makes a folder that did not exist: `name`, `name-2`, `name-3` and so on.  Raises: StorageError."""
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise StorageError(
                str(folder), f"cannot be made: {error}", change="choose another folder with --output"
            ) from error
        return folder
    raise AssertionError("count has no end")


def _check_browser(browser: str | None, option: str, kind: str) -> None:
    if browser and kind != "chromium":
        raise ConfigError("--browser", browser, f"none with {option} {kind}", f"remove it, or use {option} chromium")


def _check_scripted(backend: str, options: Mapping[str, Any]) -> None:
    for option in ("observe", "model", "url"):
        if backend == "scripted" and options[option]:
            raise ConfigError(
                f"--{option}",
                options[option],
                "none with --backend scripted, a rule that reads the pixels",
                "remove it, or use --backend openai or ollama",
            )


def open_device(
    kind: str,
    game: str,
    server: PageServer,
    page: str | None,
    serial: str | None,
    seed: int,
    rounds: int,
    lang: str,
    browser: str | None,
) -> Controller:
    """Opens a device that shows the own page, `page`, or its present screen.  Raises: DeviceError, ConfigError."""
    url = server.url(game, seed, rounds, lang)
    if kind == "adb":
        phone = AdbController(serial)
        try:
            if page is None:
                phone.reach(server.port)
            if page != NO_PAGE:
                phone.start(page or url)
        except BaseException:
            phone.close()
            raise
        return phone
    if page is not None and (kind == "drawn" or "://" not in page):
        shown = "URLs" if kind == "chromium" else "its own page"
        what = "a screen as it is" if page == NO_PAGE else "another page" if "://" in page else "an app"
        other = "chromium or adb" if "://" in page else "adb"
        raise ConfigError("--page", page, f"{shown} with --controller {kind}", f"for {what} use --controller {other}")
    return ScreenController(make_screen(kind, game, page or url, seed, rounds, browser), kind)


def _chosen(option: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        near = get_close_matches(value, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ConfigError(option, value, f"one of {', '.join(known)}", hint)
    return value


for _game in AGENTS:
    add(_game)


@app.command()
def device(
    game: Annotated[str, typer.Argument(help=f"{' or '.join(FILES)}")] = "number-game",
    screen: Annotated[str, typer.Option(help="chromium or drawn")] = "chromium",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on 127.0.0.1; 0: a free one")] = 5600,
    browser: Annotated[str | None, typer.Option(help="program of Chromium; unset: from the PATH")] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of the game")] = 0,
    rounds: Annotated[int, typer.Option(min=1, max=99, help="rounds of the game")] = 10,
    seconds: Annotated[float | None, typer.Option(min=0, help="time until it ends; unset: until Ctrl-C")] = None,
) -> None:
    """Start a device that speaks ADB and shows a game."""
    _chosen("GAME", game, list(FILES))
    _chosen("--screen", screen, [each for each in CONTROLLERS if each != "adb"])
    _check_browser(browser, "--screen", screen)
    check_pillow()
    with ExitStack() as stack:
        server = stack.enter_context(PageServer())
        shown = make_screen(screen, game, server.url(game, seed, rounds), seed, rounds, browser)
        stack.enter_context(closing(ScreenController(shown, screen)))
        try:
            phone = stack.enter_context(AdbServer(shown, port))
        except OSError as error:
            raise ConfigError(
                "--port", f"{port}: {error.strerror}", "a free port", "choose another port, or 0 for a free one"
            ) from error
        typer.echo(f"serial {phone.serial}; Ctrl-C ends it")
        sys.stdout.flush()
        end = float("inf") if seconds is None else time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                time.sleep(min(1.0, max(0.0, end - time.monotonic())))
        except KeyboardInterrupt:
            typer.echo("the device ends")


def main(words: Sequence[str]) -> int:
    """Runs `whet play WORDS`.  Returns the exit status.  Raises: WhetError on what a user can change."""
    known = [command.name for command in app.registered_commands if command.name]
    known += ["device"]
    if words and not words[0].startswith("-") and words[0] not in known:
        near = get_close_matches(words[0].replace("_", "-"), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ConfigError("whet play", words[0], f"one of {', '.join(known)}", hint)
    status = app(args=list(words), prog_name="whet play", standalone_mode=True)
    return int(status or 0)
