# SPDX-License-Identifier: Apache-2.0
"""The commands `whet env play` and `whet env check`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from whet.cli.algorithms import console
from whet.cli.arguments import KeyValues, read_options
from whet.cli.environments import Name
from whet.registry import ENVIRONMENTS, register_command

if TYPE_CHECKING:
    from whet.environments.protocol import Result, Task
    from whet.environments.running import Running
    from whet.plugins.agents.tools.toolbox import Toolbox
    from whet.types import Media, Message, Prompt

Tell = Callable[..., None]  # prints messages with their media
PromptText = Annotated[str, typer.Option("--prompt", help="text of the prompt, for an environment that reads it")]
Truth = Annotated[str, typer.Option("--ground-truth", help="ground truth of the prompt")]
Seed = Annotated[int, typer.Option(min=0, help="seed of the episode")]


@register_command("env play")
def play(
    name: Name,
    option: KeyValues = None,
    seed: Seed = 0,
    prompt: PromptText = "",
    ground_truth: Truth = "",
    tool: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="tool to call, or path/file.py:function; may be repeated")
    ] = None,
    agent: Annotated[
        list[str] | None,
        typer.Option(metavar="AGENT=NAME", help="environment of the sub-agent AGENT; unset: one turn; may be repeated"),
    ] = None,
) -> None:
    """Play an episode in the terminal: each line that you type is an answer of the model.

    The end of the input ends the episode. Pictures are shown as paths of PNG files, which are deleted at the end. You
    also answer for sub-agents: the name of the sub-agent stands before the >."""
    import asyncio

    from whet.config.environment import ToolsConfig
    from whet.environments.running import EnvironmentSpec, Running
    from whet.plugins.agents.tools.toolbox import described, toolbox_of

    options = ENVIRONMENTS[name].resolve_options(read_options(option or []), "--option")
    spec, box = EnvironmentSpec(name, options), toolbox_of(ToolsConfig(tools=[*tool])) if tool else None
    if box is not None:
        typer.echo(described([schema.to_dict() for schema in box.schemas]))
    agents, running = read_options(agent or [], "--agent"), Running((spec if box is None else box.around(spec)).load())
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory(prefix="whet-play-") as pictures:
        tell = partial(_tell, Path(pictures))
        try:
            result = runner.run(_play(running, _prompt(prompt, ground_truth), seed, agents, tell, box=box))
        finally:
            runner.run(running.call("close"))
    if result.failure is not None:
        raise typer.Exit(1)


async def _play(
    running: Running,
    prompt: Prompt,
    seed: int,
    agents: Mapping[str, str],
    tell: Tell,
    agent: str = "",
    box: Toolbox | None = None,
) -> Result:
    """Plays an episode until its end; `agent` is the name of the sub-agent, if any."""
    from whet.environments.protocol import Answer, Result
    from whet.environments.running import EnvironmentSpec, Running
    from whet.types import Failure

    async def of_task(task: Task) -> Result:
        given = replace(prompt, messages=task.messages, ground_truth=task.ground_truth, extra_info=task.extra_info)
        inside = Running(EnvironmentSpec(agents.get(task.agent, "single_turn"), {}).load())
        try:
            return await _play(inside, given, seed, agents, tell, task.agent)
        finally:
            await inside.call("close")

    outcome, answers, sums = await running.call("reset", prompt, seed), list[str](), dict[str, float]()
    tell(prompt.messages, (), agent and f"to {agent}: ")
    player = ""
    while True:
        if isinstance(outcome, Failure):
            typer.echo(f"the environment failed: {outcome.message}")
            return Result("", 0.0, len(answers), failure=outcome.message)
        if outcome.tasks:
            results = [await of_task(task) for task in outcome.tasks]
            outcome = await running.call("step", Answer("", results=tuple(results)))
            continue
        tell(outcome.messages, outcome.media)
        if answers:
            rewards = dict(outcome.rewards)
            if outcome.reward or not rewards:
                rewards[player] = rewards.get(player, 0.0) + outcome.reward
            for paid, reward in rewards.items():
                sums[paid] = sums.get(paid, 0.0) + reward
                typer.echo(f"reward{paid and f' of {paid}'} {reward:g}")
        if outcome.done or outcome.truncated:
            break
        player = outcome.player
        if (answer := _read_answer(f"{' '.join(filter(None, (agent, player)))}> ")) is None:
            typer.echo("\nthe input ended")
            break
        answers.append(answer)
        outcome = await running.call("step", Answer(answer, () if box is None else box.typed_calls(answer)))
    end = "the episode is over" if outcome.done else "a limit ended the episode" if outcome.truncated else "not over"
    numbers = "".join(f", {key} {value}" for key, value in outcome.fields.items())
    total = ", ".join(f"{paid and f'{paid} '}{value:g}" for paid, value in sums.items()) or "0"
    turns = f"{len(answers)} turn{'s' * (len(answers) != 1)}"
    typer.echo(f"{agent and f'{agent}: '}{end}: {turns}, sum of rewards {total}{numbers}")
    return Result(answers[-1] if answers else "", sum(sums.values()), len(answers), outcome.fields)


def _tell(folder: Path, messages: Sequence[Message], media: Sequence[Media], before: str = "") -> None:
    """Prints the texts of messages. Writes their pictures to the folder as PNG files, and prints the paths."""
    left = list(media)
    for message in messages:
        for part in message.parts:
            if part.get("type") == "text":
                if part["text"]:
                    typer.echo(f"{before}{part['text']}")
            elif left:
                _tell_picture(folder, left.pop(0))
            else:
                typer.echo(f"[{part.get('type', 'a part without a type')}]")
    for each in left:  # media of placeholders within a text
        _tell_picture(folder, each)


def _tell_picture(folder: Path, media: Media) -> None:
    from whet.data.media import has_pixels, images

    if not has_pixels(media):  # a video file without a choice of frames
        typer.echo(f"[{media.kind}{f' {media.source}' if isinstance(media.source, str) else ''}]")
        return
    for image in images(media):
        path = folder / f"{len([*folder.iterdir()]) + 1:03d}.png"
        image.save(path)
        typer.echo(f"[{media.kind} {path}]")


def _read_answer(shown: str) -> str | None:
    """Reads a line of input, or lines between two lines that begin with three backticks; None at the input's end."""
    typer.echo(shown, nl=False)
    lines: list[str] = []
    while line := sys.stdin.readline():
        lines.append(line)
        if (len(lines) > 1 and line.startswith("```")) or not lines[0].startswith("```"):
            break
    if not sys.stdin.isatty() and lines:
        typer.echo("".join(lines).rstrip("\n"))
    return "".join(lines).rstrip("\n") if lines else None


@register_command("env check")
def check(
    name: Name,
    option: KeyValues = None,
    seed: Seed = 0,
    prompt: PromptText = "",
    ground_truth: Truth = "",
    answer: Annotated[list[str] | None, typer.Option(help="answer to play; unset: built-in ones; repeatable")] = None,
    turns: Annotated[int, typer.Option(min=1, help="most turns of an episode")] = 50,
    seconds: Annotated[float, typer.Option(min=0.1, help="deadline of each probe, such as an episode")] = 10.0,
    max_characters: Annotated[int, typer.Option(min=1, help="most characters of an observation")] = 100_000,
) -> None:
    """Check that an environment keeps to its protocol, whatever a model answers.

    It plays episodes in processes of its own. The exit status is 1 if a check fails."""

    from whet.plugins.agents.check import Plan, check as run

    plan = Plan(_prompt(prompt, ground_truth), tuple(answer or ()), seed, turns, seconds, max_characters)
    output, num_failed = console(), 0
    for finding in run(name, read_options(option or []), plan):
        word, style = {True: ("ok", "green"), False: ("failed", "bold red"), None: ("-", "dim")}[finding.is_ok]
        output.print(Text.assemble((word.ljust(8), style), f"{finding.name:18}", finding.what))
        num_failed += finding.is_ok is False
    if num_failed:
        raise typer.Exit(1)


def _prompt(text: str, ground_truth: str) -> Prompt:
    from whet.types import Message, Prompt

    return Prompt("0:0", 0, (Message("user", text),), (1,), "env", ground_truth)
