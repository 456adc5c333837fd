# SPDX-License-Identifier: Apache-2.0
"""Distillation: losses follow transformers' log-probs, the student samples its share of rows, each row has the teacher
of its source, any split takes the same steps, and a resume has the same bits."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.first import first
from tests.raising import raises
from whet import serialization
from whet.batch import Batch
from whet.checkpoints.export import export
from whet.config import DistillConfig, load_config
from whet.data.supervised import SupervisedExample
from whet.errors import ConfigError, DataError, EngineError
from whet.models.load import load_tokenizer, stop_token_ids
from whet.plugins.lessons.init_model import init_model
from whet.plugins.teachers.served import HTTPTeacher
from whet.trainers.distill import DistillRun, aligned_teachers, distill, prompt_of
from whet.types import Media

MakeConfig = Callable[..., DistillConfig]
ALPHABET = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>"
PLAIN = {"optim.eps": 1.0, "optim.lr": 0.1, "optim.weight_decay": 0.0}  # AdamW close to plain gradient descent


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose distributions are far from even."""
    folder = tmp_path_factory.mktemp("teacher") / "t"
    init_model(folder, "qwen3", "nano", alphabet=ALPHABET, num_layers=2, seed=5)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(6.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def distill_config(model_folder: Path, teacher_folder: Path, tmp_path: Path) -> MakeConfig:
    def make(**overrides: Any) -> DistillConfig:
        small: dict[str, Any] = {
            "model.path": str(model_folder),
            "model.dtype": "float32",
            "teachers": {"*": str(teacher_folder)},
            "top_k": None,
            "data.apply_chat_template": False,
            "data.train_batch_size": 5,
            "data.max_length": 24,
            "optim.lr": 1e-3,
            "trainer.total_steps": 3,
            "trainer.logger": ["jsonl"],
            "trainer.run_dir": str(tmp_path / "run"),
        }
        return load_config(DistillConfig, None, small | overrides, given={"data"}).config

    return make


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [
        {"prompt": f"say {x}=", "response": one, "data_source": "one" if x == "x" else "two"}
        for x in "xyz"
        for one in ("aab", "cb", "baacd")
    ]


def weights(folder: Path, step: int) -> torch.Tensor:
    state = serialization.load(folder / "checkpoints" / f"global_step_{step}" / "actor.state")
    return torch.cat([weight.flatten() for weight in state["model"].values()])


def distributions(path: Path | str, prompt: str, response: str, temperature: float = 1.0) -> torch.Tensor:
    """log pi of every token in each place of a response with its end token, by transformers.   [R, V]"""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    ids, start = [*tokenizer.encode(prompt + response), tokenizer.eos_token_id], len(tokenizer.encode(prompt))
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, start - 1 : -1] / temperature).log_softmax(-1)


@pytest.mark.parametrize("top_k", first(1, [None, 3], others=pytest.mark.slow))
def test_the_loss_is_that_of_transformers_distributions(
    top_k: int | None, distill_config: MakeConfig, rows: list[dict[str, Any]], model_folder: Path, teacher_folder: Path
) -> None:
    """A mean over tokens, of whole vocabularies or of three tokens and the others, whose mass is summed here."""
    changes = {"trainer.total_steps": 1, "data.shuffle": False, "top_k": top_k, "temperature": 0.7}
    run = distill(distill_config(**changes), data=rows, val_data=rows[:5])
    expected, mass = list[float](), list[float]()
    for row in rows[:5]:
        texts = row["prompt"], row["response"]
        teacher, student = (distributions(path, *texts, 0.7).exp() for path in (teacher_folder, model_folder))
        for p, q in zip(teacher, student, strict=True):
            ids = p.topk(top_k).indices if top_k else torch.arange(len(p))
            pairs = list(zip(p[ids].tolist(), q[ids].tolist(), strict=True))
            mass.append(sum(x for x, _ in pairs))
            pairs += [(1 - sum(x for x, _ in pairs), 1 - sum(y for _, y in pairs))] if top_k else []
            expected.append(sum(x * math.log(x / y) for x, y in pairs))
    [before, first] = run.history
    assert first["distill/loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert before["val/loss"] == pytest.approx(first["distill/loss"], rel=1e-5)
    assert first["distill/tokens"] == len(expected) == 5 + sum(len(row["response"]) for row in rows[:5])
    if top_k:
        assert first["distill/teacher_mass"] == pytest.approx(sum(mass) / len(mass), rel=1e-4)


def with_other_ids(teacher: Path, out: Path) -> Path:
    """The same model, whose tokens have other ids: its rows of the vocabulary are rolled by 7."""
    shutil.copytree(teacher, out)
    model, size = AutoModelForCausalLM.from_pretrained(teacher), len(AutoTokenizer.from_pretrained(teacher))
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[:size] = weight[:size].roll(7, 0)
    model.save_pretrained(out)
    spec = json.loads((out / "tokenizer.json").read_text())
    spec["model"]["vocab"] = {text: (old + 7) % size for text, old in spec["model"]["vocab"].items()}
    for token in spec["added_tokens"]:
        token["id"] = (token["id"] + 7) % size
    (out / "tokenizer.json").write_text(json.dumps(spec))
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings.pop("added_tokens_decoder", None)
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    return out


@pytest.mark.parametrize("on_policy", first(1, [0.0, 0.5], others=pytest.mark.slow))
def test_a_teacher_with_other_ids_teaches_the_same(
    on_policy: float, distill_config: MakeConfig, rows: list[dict[str, Any]], teacher_folder: Path, tmp_path: Path
) -> None:
    other, same = with_other_ids(teacher_folder, tmp_path / "other"), {"top_k": 5, "on_policy": on_policy}
    with raises(ConfigError, "teachers.*"):
        distill(distill_config(**same, teachers={"*": str(other)}), data=rows)
    same["alignment"] = "bytes"
    equal = distill(distill_config(**same), data=rows, val_data=rows[:4])
    changes = {"teachers": {"*": str(other)}, "trainer.run_dir": str(tmp_path / "rolled")}
    rolled = distill(distill_config(**same, **changes), data=rows, val_data=rows[:4])
    for one, two in zip(equal.history, rolled.history, strict=True):
        assert {"distill/loss", "val/loss"} & {*one} and one.get("distill/aligned") == two.get("distill/aligned")
        for name in {"distill/loss", "distill/teacher_mass", "distill/grad_norm", "val/loss"} & {*one}:
            assert two[name] == pytest.approx(one[name], rel=1e-5)


def test_a_teacher_with_longer_tokens_is_compared_where_they_begin(distill_config: MakeConfig, tmp_path: Path) -> None:
    """The loss by hand, from transformers' distributions: tokens of the student are letters, of the teacher pieces."""
    teacher = init_model(tmp_path / "pieces", "qwen2.5", "nano", num_layers=2, seed=3)
    own = AutoTokenizer.from_pretrained(teacher)
    changes = {"alignment": "bytes", "teachers": {"*": str(teacher)}, "top_k": 4, "data.shuffle": False}
    texts = (("say ", "hello there"), ("the ", "end of it all"), ("in ", "x"))
    rows = [{"prompt": prompt, "response": response} for prompt, response in texts]
    changes |= {"trainer.total_steps": 1, "data.train_batch_size": 3, "data.max_length": 32}
    run = distill(distill_config(**changes), data=rows)
    letters = AutoTokenizer.from_pretrained(run.config.model.path)
    found, places = list[float](), 0
    for row in rows:
        text = row["prompt"] + row["response"]
        pieces = own.encode(text, add_special_tokens=False)
        begins = [len(own.decode(pieces[:place])) for place in range(len(pieces) + 1)]
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(teacher)(torch.tensor([pieces])).logits[0]
        student = distributions(run.config.model.path, row["prompt"], row["response"]).exp()
        names = {token: number for token, number in letters.get_vocab().items() if len(token) == 1}
        pairs = {
            own.convert_tokens_to_ids(token.translate({32: 0x120, 10: 0x10A})): number
            for token, number in names.items()
        }
        specials = {*own.all_special_tokens} & {*letters.all_special_tokens}
        pairs |= {own.convert_tokens_to_ids(each): letters.convert_tokens_to_ids(each) for each in specials}
        for place in range(len(row["response"]) + 1):
            places += 1
            at = len(row["prompt"]) + place
            if at not in begins:
                continue
            p, q = logits[begins.index(at) - 1].softmax(-1), student[place]
            ids = sorted(pairs, key=lambda each: -float(p[each]))[:4]
            both = [(float(p[each]), float(q[pairs[each]])) for each in ids]
            both.append((1 - sum(x for x, _ in both), 1 - sum(y for _, y in both)))
            found.append(sum(x * math.log(x / y) for x, y in both))
    [first] = run.history
    assert first["distill/loss"] == pytest.approx(sum(found) / len(found), rel=1e-4)
    assert first["distill/tokens"] == len(found) and len(found) < places
    assert first["distill/aligned"] == pytest.approx(len(found) / places)


def test_rows_that_an_aligned_teacher_cannot_read(
    distill_config: MakeConfig, rows: list[dict[str, Any]], teacher_folder: Path
) -> None:
    with raises(ConfigError, "top_k", found=None):
        distill_config(alignment="bytes")
    with raises(ConfigError, "alignment", found="bytes"):
        distill_config(alignment="bytes", top_k=4, teachers={"*": "http://127.0.0.1:1/v1"})
    config, tokenizer = distill_config(alignment="bytes", top_k=4), load_tokenizer(teacher_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mine>"]})
    [teacher] = aligned_teachers(config, tokenizer).values()
    ids = (*tokenizer.encode("say "), tokenizer.convert_tokens_to_ids("<mine>"))
    with raises(DataError, re.compile("example 7"), found=re.compile("<mine>")):
        teacher.check(SupervisedExample(ids, (0,) * (len(ids) - 1) + (1,)), 7)
    seen = SupervisedExample(ids[:-1], (0, 0, 0, 1), (Media("image", "x", b""),))
    with raises(DataError, "example 3"):
        teacher.check(seen, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"loss": "forward_kl"}, {"loss": "jsd", "top_k": 8}, {"loss": "reverse_kl"}], ids=str
)
def test_it_learns_the_teacher(
    changes: dict[str, Any],
    distill_config: MakeConfig,
    rows: list[dict[str, Any]],
    teacher_folder: Path,
    tmp_path: Path,
) -> None:
    more = {"trainer.total_steps": 12, "data.train_batch_size": 9, "optim.lr": 1e-2, **changes}
    run = distill(distill_config(**more), data=rows, val_data=rows[::2])
    first, last = (run.history[at]["val/loss"] for at in (0, -1))
    assert first > 0.2 and last < 0.3 * first
    out = export(tmp_path / "run", tmp_path / "out")
    teacher, student = (distributions(path, "say x=", "aab") for path in (teacher_folder, out))
    assert float((teacher.exp() * (teacher - student)).sum(-1).mean()) < 0.5


@pytest.mark.slow
def test_the_student_samples_its_share_of_rows(
    distill_config: MakeConfig, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn by step and place: 4 steps with 5 rows each, of which a half is drawn. Their responses end as the model
    ends them, or with the limit; those that were not drawn are the data's."""
    seen: list[list[SupervisedExample]] = []
    batch = DistillRun.batch

    def kept(self: DistillRun, examples: Any) -> Any:
        seen.append(list(examples))
        return batch(self, examples)

    monkeypatch.setattr(DistillRun, "batch", kept)
    changes = {"on_policy": 0.5, "max_response_length": 4, "trainer.total_steps": 4, "optim.lr": 0.0}
    run = distill(distill_config(**changes), data=rows)
    known = {each.input_ids for each in run.examples}
    new = [[each.input_ids not in known for each in examples] for examples in seen]
    shares = [record["distill/on_policy"] for record in run.history]
    assert [sum(each) / 5 for each in new] == shares and 0 < sum(shares) < 4
    ends = stop_token_ids(str(run.config.model.path), run.tokenizer)
    for examples, drawn in zip(seen, new, strict=True):
        for example, is_drawn in zip(examples, drawn, strict=True):
            response = example.input_ids[example.loss_mask.index(1) :]
            assert not is_drawn or len(response) == 4 or response[-1] in ends
            assert not is_drawn or prompt_of(example) in {prompt_of(each) for each in run.examples}
    again = distill(distill_config(**changes, **{"trainer.resume": "overwrite"}), data=rows)
    assert again.history == run.history and seen[:4] == seen[4:]


def test_the_prompt_of_a_conversation_ends_before_its_last_response() -> None:
    example = SupervisedExample(tuple(range(8)), (0, 1, 1, 0, 0, 1, 1, 0))
    assert prompt_of(example) == (0, 1, 2, 3, 4)
    assert prompt_of(SupervisedExample((4, 5, 6), (0, 1, 1))) == (4,)


@pytest.mark.slow
def test_teachers_are_those_of_the_rows_sources(
    distill_config: MakeConfig, rows: list[dict[str, Any]], model_folder: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    """Rows of the source whose teacher is the student itself have no divergence: the others' sum equals the sum of a
    run on them alone."""
    both = {"one": str(model_folder), "*": str(teacher_folder)}
    changes = {"trainer.total_steps": 1, "data.train_batch_size": 9, "data.shuffle": False}
    [mixed] = distill(distill_config(**changes, teachers=both), data=rows).history
    others = [row for row in rows if row["data_source"] == "two"]
    alone = {"data.train_batch_size": 6, "trainer.run_dir": str(tmp_path / "alone")}
    [own] = distill(distill_config(**changes | alone), data=others).history
    total = mixed["distill/loss"] * mixed["distill/tokens"]
    assert total == pytest.approx(own["distill/loss"] * own["distill/tokens"], rel=1e-5)
    with raises(ConfigError, "teachers", found=re.compile("'two'")):
        distill(distill_config(teachers={"one": str(teacher_folder)}), data=rows, dry_run=True)


def test_a_weight_is_as_many_copies(distill_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    changes = {**PLAIN, "trainer.total_steps": 1, "data.shuffle": False, "trainer.save_freq": 1}
    weighed = [{**row, "example_weight": weight} for row, weight in zip(rows[:3], (1, 2, 3), strict=True)]
    copies = [rows[0], rows[1], rows[1], rows[2], rows[2], rows[2]]
    [one] = distill(distill_config(**changes, **{"data.train_batch_size": 3}), data=weighed).history
    there = {"trainer.run_dir": str(tmp_path / "copies"), "data.train_batch_size": 6}
    [other] = distill(distill_config(**changes, **there), data=copies).history
    for name in ("distill/loss", "distill/grad_norm"):
        assert one[name] == pytest.approx(other[name], rel=1e-5)
    torch.testing.assert_close(weights(tmp_path / "run", 1), weights(tmp_path / "copies", 1), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"loss": "jsd"}, {"top_k": 4, "on_policy": 0.6}], ids=str)
@pytest.mark.parametrize(
    "split",
    [
        {"engine.packing": False, "max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 40},
        {"cluster.processes": 2},
        {"engine.name": "fsdp"},
    ],
    ids=str,
)
def test_any_split_of_a_batch_takes_the_same_steps(
    split: dict[str, Any],
    changes: dict[str, Any],
    distill_config: MakeConfig,
    rows: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    if "engine.name" in split:  # no whole model to sample from
        changes = {**changes, "on_policy": 0.0}
    one = distill(distill_config(**PLAIN, **changes), data=rows, val_data=rows[:3])
    there = {"trainer.run_dir": str(tmp_path / "other")}
    other = distill(distill_config(**PLAIN, **changes, **split, **there), data=rows, val_data=rows[:3])
    for mine, theirs in zip(one.history, other.history, strict=True):
        assert mine == pytest.approx({name: theirs[name] for name in mine}, rel=2e-5, abs=2e-5)


def stop_at_three(run: DistillRun) -> None:
    if run.step == 3:
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"on_policy": 0.5},
        {"on_policy": 1.0, "model.lora.rank": 4, "top_k": 5},
        {"on_policy": 1.0, "model.lora.rank": 2, "model.dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    changes: dict[str, Any], distill_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    both = {"optim.schedule": "cosine", "trainer.save_freq": 1, "trainer.total_steps": 4, **changes}
    distill(distill_config(**both, **{"trainer.run_dir": str(tmp_path / "straight")}), data=rows)
    with pytest.raises(KeyboardInterrupt):
        distill(distill_config(**both), data=rows, callbacks=[stop_at_three])
    resumed = distill(distill_config(**both), data=rows)
    assert resumed.opened.found == tmp_path / "run" / "checkpoints" / "global_step_2"
    assert torch.equal(weights(tmp_path / "run", 4), weights(tmp_path / "straight", 4))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "straight/metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_resumed_run_has_the_teacher_that_it_began_with(
    distill_config: MakeConfig, rows: list[dict[str, Any]], model_folder: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    teacher = Path(shutil.copytree(teacher_folder, tmp_path / "teacher"))
    changes = {"teachers": {"*": str(teacher)}, "trainer.save_freq": 1}
    distill(distill_config(**changes, **{"trainer.total_steps": 1}), data=rows)
    assert distill(distill_config(**changes, **{"trainer.total_steps": 2}), data=rows).opened.first_step == 1
    shutil.copy(model_folder / "model.safetensors", teacher)
    with raises(ConfigError, f"weights of {teacher}"):
        distill(distill_config(**changes), data=rows)


def test_what_does_not_go_together(distill_config: MakeConfig, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    with raises(ConfigError, "teachers", found={}):
        distill_config(teachers={})
    served = {"*": "http://127.0.0.1:1/v1"}
    with raises(ConfigError, "top_k", found=None):
        distill_config(teachers=served)
    with raises(ConfigError, "temperature", found=0.5):
        distill_config(teachers=served, top_k=4, temperature=0.5)
    other = init_model(tmp_path / "other", "qwen3", "nano", alphabet=ALPHABET[5:], num_layers=2)
    with raises(ConfigError, "teachers.*", found=str(other)):
        distill(distill_config(teachers={"*": str(other)}), data=rows, dry_run=True)


@pytest.mark.slow
def test_a_teacher_behind_a_server_is_the_one_in_the_process(
    distill_config: MakeConfig,
    rows: list[dict[str, Any]],
    teacher_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "plugins" / "serving"))
    from server_processes import started

    changes = {"top_k": 6, "on_policy": 0.5, **PLAIN}
    own = distill(distill_config(**changes), data=rows, val_data=rows[:2])
    with started(teacher_folder, "--name", "t", "--dtype", "float32") as server:
        there = {"teachers": {"*": f"{server.address}/v1"}, "trainer.run_dir": str(tmp_path / "served")}
        served = distill(distill_config(**changes, **there), data=rows, val_data=rows[:2])
    assert list(served.roles) == ["actor"]
    for mine, theirs in zip(own.history, served.history, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


class Told(BaseHTTPRequestHandler):
    """A server that tells `places` of every text."""

    places: ClassVar[list[Any]] = []

    def do_GET(self) -> None:
        self.say({"data": [{"id": "t"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt_logprobs"]
        best = [each and dict(sorted(each.items(), key=lambda one: -one[1]["logprob"])[:asked]) for each in self.places]
        self.say({"choices": [{"prompt_logprobs": best}]})

    def say(self, answer: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def told(model_folder: Path) -> Iterator[HTTPTeacher]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Told) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1/"
        yield HTTPTeacher("teachers.*", address, load_tokenizer(model_folder))
        server.shutdown()


@pytest.mark.slow
def test_a_row_without_a_prompt_is_trained_behind_its_first_token(
    distill_config: MakeConfig, teacher_folder: Path
) -> None:
    """The row has the distributions of a row whose prompt is the first token. A sampled response follows it."""
    bare, whole = [
        distill(distill_config(**PLAIN, **{"trainer.total_steps": 1, "trainer.resume": "overwrite"}), data=[row])
        for row in ({"prompt": "", "response": "abc"}, {"prompt": "a", "response": "bc"})
    ]
    assert bare.history[0]["distill/loss"] == whole.history[0]["distill/loss"] > 0
    sampled = distill_config(on_policy=1.0, **{"trainer.total_steps": 1, "trainer.resume": "overwrite"})
    assert distill(sampled, data=[{"prompt": "", "response": "abc"}]).history[0]["distill/tokens"] > 1


def test_what_a_server_tells(told: HTTPTeacher) -> None:
    """The tokens of the prompt are not read; the likeliest of four is not the student's."""
    ids = told._tokenizer.encode("abc")
    batch = Batch.of(
        {
            "input_ids": torch.tensor([[0, *ids]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1]]),
            "response_mask": torch.tensor([[0, 1]]),
        }
    )
    [own] = ids[2:]
    place = {str(own): {"logprob": math.log(0.0625), "decoded_token": "c"}}
    place |= {str(n): {"logprob": math.log(p)} for n, p in ((7, 0.125), (9, 0.25), (5000, 0.4375))}
    Told.places = [None, {}, place]
    found = told.outcomes(batch, 2, 40)
    assert found["teacher_ids"].tolist() == [[[0, 0], [9, 7]]]
    assert found["teacher_outcomes"][0, 1].exp().tolist() == pytest.approx([0.25, 0.125, 0.625])
    with raises(EngineError, "teachers.*", expected="top_k=4"):
        told.outcomes(batch, 4, 40)
    place["7"]["decoded_token"] = "Z"  # each token is read once
    with raises(EngineError, "teachers.*", found=re.compile("'Z'")):
        told.outcomes(batch, 2, 40)
    Told.places = [None, {}]
    with raises(EngineError, "teachers.*", found=re.compile("2 of 3")):
        told.outcomes(batch, 2, 40)
