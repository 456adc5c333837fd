# SPDX-License-Identifier: Apache-2.0
"""The commands `whet quickstart` and `whet init-model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from whet.cli.arguments import program
from whet.registry import register_command

GSM8K = "openai/gsm8k:main"
# As in init_model, which loads torch.
TextArch = Literal[
    "qwen2.5", "qwen3", "qwen3_moe", "llama", "mistral", "gemma", "gemma2", "phi",
    "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5",
]  # fmt: skip
VisionArch = Literal["qwen2_vl", "qwen2.5_vl", "qwen3_vl", "smolvlm"]


@register_command("quickstart", panel="Getting started")
def quickstart(
    run_dir: Annotated[
        Path | None, typer.Option(help="the folder to write; unset: runs/ and the recipe's name")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="random seed")] = 0,
    images: Annotated[bool, typer.Option("--images", help="a vision model learns to count figures")] = False,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="SmolLM2-135M learns sums and last words")] = False,
) -> None:
    """Train a small model to add or to count, or a pretrained one."""
    from whet.plugins.lessons.quickstart import ADDITION, quickstart as run
    from whet.plugins.lessons.quickstart_images import COUNTING
    from whet.plugins.lessons.quickstart_pretrained import PRETRAINED
    from whet.tracking.console import LongPhases

    if images and pretrained:
        raise typer.BadParameter("--images and --pretrained are two quickstarts; choose one")
    lesson = COUNTING if images else PRETRAINED if pretrained else ADDITION
    with LongPhases().watch():
        run(run_dir or Path("runs", lesson.recipe), seed, program(), lesson)


@register_command("init-model", panel="Getting started")
def init_model(
    out: Annotated[Path, typer.Argument(help="the folder to write")],
    arch: Annotated[
        Literal[TextArch, VisionArch],
        typer.Option(help="architecture; gemma is Gemma 3, phi is Phi 3 and 4; *_vl and smolvlm read images"),
    ] = "qwen3",
    size: Annotated[str, typer.Option(help="nano (0.8 M), tiny (3.3 M), small (27 M) or base (390 M)")] = "tiny",
    texts: Annotated[
        Path | None, typer.Option(help="train the tokenizer on the lines of this file", exists=True, dir_okay=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="random seed of the weights")] = 0,
    patch_size: Annotated[int, typer.Option(min=2, help="pixels on a side of a patch; 2 x 2 patches are a token")] = 14,
) -> None:
    """Create a model folder: random weights, a trained tokenizer."""
    from whet.plugins.lessons.init_model import init_model as run
    from whet.tracking.console import long_phase

    lines = None if texts is None else texts.read_text(encoding="utf-8").splitlines(keepends=True)
    with long_phase("making the model"):
        written = run(out, arch, size, seed=seed, texts=lines, patch_size=patch_size)
    if arch in get_args(VisionArch):
        what, project = f"on drawn pictures, as `{program()} quickstart --images` with a model of its own", "vision"
        sft, rl = "vlm_quickstart_sft data.max_length=256", "vlm_quickstart data.max_prompt_length=256"
        rows = held_out = "whet.plugins.lessons.drawn.figures:counting"
    else:
        what, project, sft, rl = "for instance with GSM8K from the hub", "whet", "data.prompt_key=question", "gsm8k"
        rows, held_out = f"{GSM8K}@train", f"{GSM8K}@test"
    typer.echo(
        f"wrote {written}. Its weights are random: run SFT before RL, {what}:\n"
        f"  {program()} sft {sft} model.path={written} data.train_files={rows} data.response_key=answer\n"
        f"  {program()} export runs/{project}/sft {written}_sft\n"
        f"  {program()} train {rl} model.path={written}_sft data.train_files={rows} data.val_files={held_out}"
    )
