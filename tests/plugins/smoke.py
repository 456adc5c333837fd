# SPDX-License-Identifier: Apache-2.0
"""A run of the core alone: `python smoke.py FOLDER` makes a model and rows, trains, resumes, exports and loads.

It imports nothing of the tests, and whet from the Python path, which may lack plugins."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import whet
from whet.cli.app import main

WORDS = ["<end>", "<pad>", *"0123456789+= "]


def make(folder: Path) -> None:
    """Writes a model of 20,000 parameters, its tokenizer and rows."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=16, num_key_value_heads=2, eos_token_id=0, pad_token_id=1, **shape)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": f"{a + b}", "data_source": "sums"} for a in range(4) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def share_of_digits(solution_str: str, ground_truth: str) -> float:
    """The score of a response: it differs between any two that a random model samples."""
    return sum(map(str.isdigit, solution_str)) / 8


def call(*words: str) -> None:
    """Runs a command of whet in this process."""
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, f"{words} ended with {end.code}"


def run(folder: Path) -> None:
    """Trains two steps and, as a resumed run, a third; exports the run, and loads the result."""
    keys = [f"model.path={folder}/model", f"data.train_files={folder}/rows.jsonl", f"trainer.run_dir={folder}/run"]
    keys += ["data.prompt_key=prompt", "data.answer_key=answer", "actor.optim.lr=1e-2"]
    keys += [f"reward.function={Path(__file__).resolve()}:share_of_digits"]
    call("train", "smoke", *keys)
    call("train", "smoke", *keys, "trainer.total_steps=3")
    steps = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3], steps
    call("export", f"{folder}/run", f"{folder}/out", "--dtype", "float32")
    before, after = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("model", "out"))
    pairs = list(zip(before.parameters(), after.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in pairs) and all(b.isfinite().all() for _, b in pairs)


if __name__ == "__main__":
    made = Path(sys.argv[1])
    make(made)
    run(made)
    sys.stdout.write(f"smoke: {whet.__file__}\n")
