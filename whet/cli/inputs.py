# SPDX-License-Identifier: Apache-2.0
"""`whet config` and `whet data`: the inputs of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from whet.cli.arguments import ConfigName, RecipeAndOverrides, split_recipe
from whet.errors import ConfigError
from whet.registry import COMMANDS, TRAINERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from whet.config.schema import RunConfig, WholeConfig
    from whet.config.section import Section
    from whet.data.preview import Preview, PreviewRow

NOTES_START_BY = 60  # columns; a longer line moves only its own note to the right
BAR = 40  # columns of the longest bar
STRIPES = ("on grey23", "on grey35")  # backgrounds of alternating tokens
LEARNED, READ = "bold green", "dim"
OPEN, CLOSE = "⟦", "⟧"  # around trained tokens, where there are no colours
MAX_FACT_CHARACTERS = 300
TRAINING = ", ".join(TRAINERS.shipped)
CONVERTS = "config convert" in COMMANDS.shipped
CONVERT = "; convert: FILE or 'COMMAND' of another framework to a recipe" if CONVERTS else ""
For = Annotated[
    str | None,
    typer.Option("--for", help=f"command of the config ({TRAINING}, ...); unset: train, or sft if only sft accepts it"),
]


def _of_convert(*names: str, help: str) -> Any:  # noqa: A002  # as typer names it
    return typer.Option(*names, help=f"convert: {help}", hidden=not CONVERTS)


def config(
    command: Annotated[str, typer.Argument(help=f"the command ({TRAINING}, eval, ...){CONVERT}")],
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    meanings: Annotated[bool, typer.Option("--meanings", help="show meanings of keys, not sources of values")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON Schema of recipes, for editors")] = False,
    system: Annotated[str | None, _of_convert("--from", help="framework (verl, easyr1, roll, trl)")] = None,
    output: Annotated[Path | None, _of_convert("-o", "--output", help="the recipe file to write")] = None,
    variables: Annotated[list[str] | None, _of_convert("--set", help="NAME=VALUE of the script")] = None,
) -> None:
    """Print a resolved config, or the JSON Schema of recipes."""
    from whet.config.commands import schema_of

    if command == "convert":
        COMMANDS["config convert"].load()(words or [], system, output, variables or [])
    elif schema:
        from whet.config.load import json_schema

        typer.echo(json.dumps(json_schema(schema_of(command)), indent=1))
    else:
        _print(schema_of(command), *split_recipe(words, config_name), meanings=meanings)


def _print(schema: type[Section], recipe: str | None, overrides: list[str], *, meanings: bool) -> None:
    """Prints the config, one line for each key with its note, then the errors that the command would raise."""
    from whet.config import keyed_lines, load_config, problems
    from whet.config.load import DEFAULT
    from whet.config.section import meaning

    loaded = load_config(schema, recipe, overrides, checked=False)
    lines = keyed_lines(loaded.config)
    width = max(len(line) for line, _ in lines if len(line) < NOTES_START_BY)
    output = Console(soft_wrap=True, highlight=False)
    for line, key in lines:
        if not key:
            output.print(line)
            continue
        source = loaded.source(key)
        note = meaning(schema, key) if meanings else source
        line_style, note_style = ("", "dim") if source == DEFAULT else ("bold", "cyan")
        output.print(Text.assemble((line.ljust(width), line_style), (f"  # {note}", note_style)))
    if found := problems(loaded.config):
        errors = Console(stderr=True, soft_wrap=True, highlight=False)
        errors.print(Text(f"\n`whet {schema.command}` would refuse this config:", style="yellow"))
        for each in found:
            errors.print(Text(f"- {each}"))


def data(
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    rows: Annotated[int, typer.Option(min=0, help="number of rows to show")] = 3,
    index: Annotated[int | None, typer.Option(min=0, help="show the row with this number")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="list each token with its id and its loss mask")] = False,
    val: Annotated[bool, typer.Option("--val", help="show data.val_files instead of data.train_files")] = False,
    drawn: Annotated[bool, typer.Option("--drawn", help="show rows in the order in which the run draws them")] = False,
    thumbnails: Annotated[Path | None, typer.Option(help="folder for a thumbnail of each image and video")] = None,
    command: For = None,
) -> None:
    """Show data rows as the model reads them: text, tokens, images.

    `convert FILE [OUTPUT]` writes a pickle's rows as JSON lines, without running its code."""
    if words and words[0] == "convert":
        _convert_rows(words[1:])
        return
    config = config_of(command, *split_recipe(words, config_name))

    from whet.config.checks import check_data
    from whet.data.preview import preview
    from whet.models.load import load_tokenizer

    check_data(config, validation=val)
    model = config.model
    tokenizer = load_tokenizer(model.tokenizer_path or model.path or "", trust_remote_code=model.trust_remote_code)
    found = preview(config, tokenizer, num_rows=rows, index=index, validation=val, drawn=drawn)
    output = Console(highlight=False, soft_wrap=True, markup=False)
    for line in _summary(found):
        output.print(line)
    for row in found.rows:
        output.print()
        _print_row(output, tokenizer, row, tokens)
        _print_media(output, row, thumbnails)


def _convert_rows(words: list[str]) -> None:
    from whet.data.sources import read_pickle, write_rows

    if len(words) not in (1, 2) or not Path(words[0]).is_file():
        expected = "an existing file, and optionally the file to write"
        raise ConfigError("arguments", " ".join(words) or None, expected, "write whet data convert rows.pkl")
    output = Path(words[1] if words[1:] else words[0]).with_suffix(".jsonl")
    for each in (output, output.with_suffix(".parquet")):  # of rows with bytes
        if each.exists():
            raise ConfigError("OUTPUT", f"{each} exists", "a new file", "name another, or remove it")
    rows = read_pickle(Path(words[0]))
    typer.echo(f"wrote {len(rows)} rows to {write_rows(output, rows)}")


def config_of(command: str | None, recipe: str | None, words: list[str]) -> WholeConfig:
    """Loads the config for `command`; None: for `whet train`, or for `whet sft` if `whet train` refuses the config."""
    from whet.config import load_config
    from whet.config.commands import schema_of

    refused: list[ConfigError] = []
    for each in [command] if command else ["train", "sft"]:
        try:
            schema: type[Any] = schema_of(each)
            return load_config(schema, recipe, words, checked=False).config
        except ConfigError as error:
            refused.append(error)
    raise refused[0]


def run_config_of(command: str | None, recipe: str | None, overrides: list[str]) -> RunConfig:
    """Loads the config of a training run.  Raises: ConfigError for the config of another command."""
    from whet.config import EvalConfig, GenerateConfig

    config = config_of(command, recipe, overrides)
    if isinstance(config, EvalConfig | GenerateConfig):
        raise ConfigError("--for", command, f"the command of a trainer: {TRAINING}", "name a trainer's command")
    return config


def _summary(found: Preview) -> Iterator[str]:
    from whet.data.preview import histogram, percentile

    for part in found.parts:
        filtered = f", {part.num_matching} after data.filter" if part.num_matching < part.num_rows else ""
        weight = f", {part.weight:.1%} of the rows drawn" if part.weight is not None else ""
        yield f"{part.name}: {part.num_rows} rows{filtered}{weight}"
    lengths = sorted(found.lengths)
    shares = "  ".join(f"p{round(100 * share)} {percentile(lengths, share)}" for share in (0.5, 0.9, 0.99))
    yield f"tokens: min {lengths[0]}  {shares}  max {lengths[-1]}; {found.limit_key}={found.limit}"
    bins = histogram(lengths)
    most, width = max(count for _, _, count in bins), len(str(lengths[-1]))
    for low, high, count in bins:
        over = f"  over {found.limit_key}" if low > found.limit else ""
        yield f"  {low:>{width}} to {high:>{width}}  {'█' * -(-BAR * count // most):<{BAR}}  {count}{over}"
    if found.num_over:
        yield f"{found.num_over} of {len(lengths)} are over {found.limit_key}={found.limit}: {found.over_limit}"
    if found.data_sources:
        listed = ", ".join(f"{name} {count}" for name, count in found.data_sources.most_common(10))
        yield f"data sources: {listed}"
    yield from found.notes
    if found.num_unanswered:
        yield f"{found.num_unanswered} rows have no ground truth"


def _print_row(output: Console, tokenizer: PreTrainedTokenizerBase, row: PreviewRow, by_token: bool) -> None:
    from whet.data.preview import pieces, shortened, spans

    texts, mask = pieces(tokenizer, row.token_ids), row.mask or (0,) * len(row.token_ids)
    learned = f", {sum(mask)} of them trained on" if row.mask is not None else ", then the policy generates"
    output.print(Text(f"── {row.title}: {len(row.token_ids)} tokens{learned}", style="bold cyan"))
    if by_token:
        output.print(f"{'index':>5}  {'id':>7}  {'mask':>4}  token")
        for place, (token_id, learns, text) in enumerate(zip(row.token_ids, mask, texts, strict=True)):
            output.print(f"{place:>5}  {token_id:>7}  {learns:>4}  {text!r}", style=LEARNED if learns else None)
    elif output.is_terminal:
        shown = Text()
        for place, (text, learns) in enumerate(zip(texts, mask, strict=True)):
            style = f"{LEARNED if learns else READ if row.mask else ''} {STRIPES[place % 2]}".strip()
            shown.append(text.replace("\n", "⏎\n"), style)
        output.print(shown)
    else:
        marked = [f"{OPEN}{text}{CLOSE}" if learns else text for learns, text in spans(texts, mask)]
        output.print(Text(shortened("".join(marked), row.media)))
        output.print(f"ids: {' '.join(map(str, row.token_ids))}")
    for name, value in row.facts.items():
        text = value if isinstance(value, str) else repr(value)
        cut = f"{text[:MAX_FACT_CHARACTERS]} ..." if len(text) > MAX_FACT_CHARACTERS else text
        output.print(Text.assemble((f"{name}: ", "bold"), cut))


def _print_media(output: Console, row: PreviewRow, folder: Path | None) -> None:
    """Prints a line for each image and video of a row. With a `folder`, also writes a thumbnail of each into it."""
    from whet.data.preview import thumbnail

    for number, each in enumerate(row.media):
        assert each.tokens is not None
        height, width = each.tokens.size
        frames = f", {len(each.frames)} frames" if each.frames else ""
        size = f"{each.tokens.count} tokens, {width} x {height} pixels{frames}"
        line = f"{each.kind} {number}: {size}, {each.digest[:12]}"
        if folder is not None:
            path = folder / f"{row.title.replace(' ', '_')}_{number}.png"
            thumbnail(each, path)
            line += f", {path}"
        output.print(line)
