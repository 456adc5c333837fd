# SPDX-License-Identifier: Apache-2.0
"""`whet init-model` and `whet export`: model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from whet.cli.arguments import TrustRemoteCode, program
from whet.errors import ConfigError

GSM8K = "openai/gsm8k:main"
# As in whet/models/, which loads torch.
TextArch = Literal[
    "qwen2.5", "qwen3", "qwen3_moe", "llama", "mistral", "gemma", "gemma2", "phi",
    "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5",
]  # fmt: skip
VisionArch = Literal["qwen2_vl", "qwen2.5_vl", "qwen3_vl", "smolvlm"]


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
    from whet.models.init import init_model as run
    from whet.tracking.console import long_phase

    lines = None if texts is None else texts.read_text(encoding="utf-8").splitlines(keepends=True)
    with long_phase("making the model"):
        written = run(out, arch, size, seed=seed, texts=lines, patch_size=patch_size)
    if arch in get_args(VisionArch):
        what, project = f"on drawn pictures, as `{program()} quickstart --images` with a model of its own", "vision"
        sft, rl = "vlm_quickstart_sft data.max_length=256", "vlm_quickstart data.max_prompt_length=256"
        rows = held_out = "whet.data.drawn.figures:counting"
    else:
        what, project, sft, rl = "for instance with GSM8K from the hub", "whet", "data.prompt_key=question", "gsm8k"
        rows, held_out = f"{GSM8K}@train", f"{GSM8K}@test"
    typer.echo(
        f"wrote {written}. Its weights are random: run SFT before RL, {what}:\n"
        f"  {program()} sft {sft} model.path={written} data.train_files={rows} data.response_key=answer\n"
        f"  {program()} export runs/{project}/sft {written}_sft\n"
        f"  {program()} train {rl} model.path={written}_sft data.train_files={rows} data.val_files={held_out}"
    )


def export(
    checkpoint: Annotated[Path, typer.Argument(help="global_step_N of a run, whet's or verl's, or a run (its newest)")],
    out: Annotated[Path, typer.Argument(help="the folder to write")],
    adapter: Annotated[bool, typer.Option("--adapter", help="write only the adapter, in peft's format")] = False,
    base: Annotated[
        str | None,
        typer.Option(
            help="path of the adapter's base model, if it has moved; with --from, of the model's config and tokenizer"
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="dtype of the weights; default: that of the run's rollout, without a rollout float32"),
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="ENGINE", help="write the form of this training engine instead: megatron")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="ENGINE", help="read a folder in the form of this training engine: megatron"),
    ] = None,
    hub: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="upload the folder to the hub too")] = None,
    private: Annotated[bool, typer.Option("--private", help="with --hub: make a new repository private")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Export the model of a checkpoint as a Hugging Face folder."""
    from whet.checkpoints.export import check_new, export as run, from_weights, model_folder
    from whet.checkpoints.hub import address, upload
    from whet.registry import ENGINES
    from whet.tracking.console import long_phase

    unused = (
        {"--adapter": adapter, "--to": source and to} if source else {"--base": base, "--dtype": dtype} if to else {}
    )
    if found := next((name for name, value in {"--adapter": to and adapter, **unused}.items() if value), None):
        raise ConfigError(found, f"set beside {'--from' if source else '--to'}", change="leave it out")
    with long_phase("exporting"):
        check_new(out)
        if source is not None:
            model = Path(base or checkpoint)
            read = ENGINES[source].marked("reads")(checkpoint, model)
            from_weights(out, model, read, dtype=dtype or "float32", trust_remote_code=trust_remote_code)
        elif to is not None:
            with model_folder(str(checkpoint), trust_remote_code=trust_remote_code) as folder:
                ENGINES[to].marked("writes")(folder, out)
        else:
            run(checkpoint, out, adapter=adapter, base=base, dtype=dtype, trust_remote_code=trust_remote_code)
    typer.echo(f"wrote {out}")
    if hub is not None:
        with long_phase("uploading"):
            upload(out, hub, private=private)
        typer.echo(f"uploaded it to {address(hub)}")
