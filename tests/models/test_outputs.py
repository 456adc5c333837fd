# SPDX-License-Identifier: Apache-2.0
"""Model outputs against plain transformers, packed and padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.first import first
from tests.raising import raises
from whet.errors import EngineError, ModelError
from whet.models import outputs
from whet.models.load import load_policy, load_value_model
from whet.models.outputs import ForwardSettings, model_outputs, prompt_log_probs


def random_batch(rows: int = 5, prompt: int = 9, response: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Ragged rows with tool text in the middle and one failed row; rows 0 and 3 answer one prompt, 2 and 4 another."""
    draw = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, 40, (rows, prompt + response), generator=draw)
    attention_mask = torch.ones_like(input_ids)
    response_mask = torch.ones(rows, response, dtype=torch.int64)
    for row in range(rows):
        left = int(torch.randint(0, prompt - 1, (), generator=draw))
        right = int(torch.randint(0, response - 2, (), generator=draw))
        attention_mask[row, :left] = 0
        attention_mask[row, prompt + response - right :] = 0
        response_mask[row, response - right :] = 0
        response_mask[row, 1:2] = 0
    response_mask[1] = 0
    for row, other in {3: 0, 4: 2}.items():
        input_ids[row, :prompt], attention_mask[row, :prompt] = (
            input_ids[other, :prompt],
            attention_mask[other, :prompt],
        )
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response_mask,
    }


def plain_log_probs(
    folder: Path, batch: dict[str, torch.Tensor], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' own forward on the padded batch: log-probs and entropy [B, R]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(
            batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
        ).logits
    width = batch["response_mask"].shape[1]
    log_pi = (logits[:, -width - 1 : -1] / temperature).log_softmax(-1)
    chosen = log_pi.gather(2, batch["input_ids"][:, -width:, None])[..., 0]
    mask = batch["response_mask"]
    return chosen * mask, -(log_pi.exp() * log_pi).sum(-1) * mask


@pytest.mark.parametrize("packing", [True, False])
def test_log_probs_of_the_vocabulary_equal_transformers(model_folder: Path, packing: bool) -> None:
    batch = random_batch()
    needs = frozenset({"vocab_log_probs"})
    with torch.no_grad():
        got = model_outputs(load_policy(model_folder), batch, needs, ForwardSettings(packing=packing), 0.6)
    whole = got["vocab_log_probs"]
    mask, width = batch["response_mask"], batch["response_mask"].shape[1]
    log_probs, entropy = plain_log_probs(model_folder, batch, 0.6)
    chosen = whole.gather(2, batch["input_ids"][:, -width:, None])[..., 0]
    torch.testing.assert_close(chosen, log_probs, atol=2e-5, rtol=0)
    torch.testing.assert_close(-(whole.exp() * whole).sum(-1), entropy, atol=2e-5, rtol=0)
    assert not whole[mask == 0].any()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("folder", ["model_folder", "qwen25_folder"])
def test_log_probs_and_entropy_equal_transformers(
    folder: str, packing: bool, temperature: float, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(folder)
    batch = random_batch()
    settings = ForwardSettings(packing=packing, chunk_tokens=7)
    with torch.no_grad():
        got = model_outputs(load_policy(path), batch, frozenset({"log_probs", "entropy"}), settings, temperature)
    log_probs, entropy = plain_log_probs(path, batch, temperature)
    torch.testing.assert_close(got["log_probs"], log_probs, atol=2e-5, rtol=0)
    torch.testing.assert_close(got["entropy"], entropy, atol=2e-5, rtol=0)


@pytest.mark.parametrize("short", [8, 0])
@pytest.mark.parametrize("window", first(1, [None, 4], others=pytest.mark.slow))
def test_a_prompt_read_once_gives_the_same_log_probs_and_gradients(
    short: int, window: int | None, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where the two differ by rounding alone, by both ways to compute attention."""
    from whet.kernels import attention

    monkeypatch.setattr(attention, "SHORT", short)
    path = model_folder if window is None else windowed(model_folder, tmp_path, window)
    batch = random_batch(rows=12)
    for row in range(5, 12):
        batch["input_ids"][row, :9], batch["attention_mask"][row, :9] = (
            batch[name][row % 3, :9] for name in ("input_ids", "attention_mask")
        )
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    found = []
    for share in (False, True):
        model = load_policy(path).double()
        settings = ForwardSettings(share_prompts=share, dtype=torch.float64)
        log_probs = model_outputs(model, batch, frozenset({"log_probs"}), settings)["log_probs"]
        (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((log_probs.detach(), gradient))
    (plain, plain_gradient), (shared, shared_gradient) = found
    # the rotary angles are taken in float32
    torch.testing.assert_close(shared, plain, atol=1e-6, rtol=0)
    assert (shared_gradient - plain_gradient).norm() < 1e-6 * plain_gradient.norm()


@pytest.mark.parametrize("short", first(1, [8, 0], others=pytest.mark.slow))
def test_shapes_that_are_padded_to_come_again_change_nothing(
    short: int, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many wide rows, so that tokens, rows, widths and shared prompts are all rounded up; in few bunches and many."""
    from whet.kernels import attention
    from whet.models import packing

    monkeypatch.setattr(attention, "SHORT", short)
    batch = random_batch(rows=90, prompt=45, response=60)
    for column in (batch["input_ids"], batch["attention_mask"]):
        column[5:, :45] = column[torch.arange(5, 90) % 4, :45]
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    where = packing.layout(batch, share_prompts=True, ends=False)
    assert max(bunch.num_rows for bunch in where.bunches) >= 32 and max(b.prefix_width for b in where.bunches) >= 32
    assert where.bunches[0].width >= 32
    expected = plain_log_probs(model_folder, batch, 1.0)[0]
    for few_pairs in (0, packing.FEW_PAIRS, 2**22):
        monkeypatch.setattr(packing, "FEW_PAIRS", few_pairs)
        with torch.no_grad():
            got = model_outputs(load_policy(model_folder), batch, frozenset({"log_probs"}), ForwardSettings())
        torch.testing.assert_close(got["log_probs"], expected, atol=2e-5, rtol=0)


def windowed(folder: Path, out: Path, window: int) -> Path:
    """A model like that in `folder` whose first layer sees `window` tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(folder)
    config.use_sliding_window, config.sliding_window = True, window
    config.layer_types = ["sliding_attention", "full_attention"]
    Qwen3ForCausalLM(config).save_pretrained(out)
    return out


def test_sliding_window(tmp_path: Path, model_folder: Path) -> None:
    windowed(model_folder, tmp_path, 4)
    batch = random_batch()
    with torch.no_grad():
        got = model_outputs(load_policy(tmp_path), batch, frozenset({"log_probs"}), ForwardSettings())
    torch.testing.assert_close(got["log_probs"], plain_log_probs(tmp_path, batch, 1.0)[0], atol=2e-5, rtol=0)


def test_a_fresh_value_model_says_zero_and_learns(model_folder: Path) -> None:
    model = load_value_model(model_folder)
    batch = random_batch()
    values = model_outputs(model, batch, frozenset({"values"}), ForwardSettings())["values"]
    assert values.abs().max() == 0
    (values - batch["response_mask"]).square().sum().backward()
    assert model.value_head.weight.grad is not None and model.value_head.weight.grad.norm() > 0


def test_an_output_that_a_model_does_not_have_is_named(model_folder: Path) -> None:
    with raises(EngineError, "Qwen3ForCausalLM", expected="values"):
        model_outputs(load_policy(model_folder), random_batch(), frozenset({"values"}), ForwardSettings())


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with raises(ModelError, f"{tmp_path / 'nothing'}"):
        load_policy(tmp_path / "nothing")


@pytest.mark.parametrize("packing", [True, False])
def test_the_likeliest_tokens_of_a_prompt_are_computed_in_blocks(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    """The numbers of transformers, from tables of at most `chunk_tokens` positions."""
    rows, whole = list[int](), outputs.vocab_log_probs

    def counted(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows.append(len(hidden))
        return whole(hidden, *args, **kwargs)

    monkeypatch.setattr(outputs, "vocab_log_probs", counted)
    prompt, settings = [3, 9, 4, 7, 12, 5, 8, 6], ForwardSettings(packing=packing, chunk_tokens=3)
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    own, likeliest = prompt_log_probs(load_policy(model_folder), prompt, 4, settings)
    assert rows == [3, 3, 1] and max(len(each) for each in likeliest) == 4
    assert own == pytest.approx(expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist(), abs=1e-5)
    for found, row in zip(likeliest, expected, strict=True):
        tokens, values = zip(*found, strict=True)
        assert [*tokens] == row.topk(4).indices.tolist() and values == pytest.approx(
            row.topk(4).values.tolist(), abs=1e-5
        )
    assert prompt_log_probs(load_policy(model_folder), prompt, 0, settings)[0] == pytest.approx(own, abs=1e-5)
