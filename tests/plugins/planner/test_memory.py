# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.config import SFTConfig, TrainConfig, load_config
from whet.config.schema import RolloutConfig
from whet.kernels.sampling import SamplingState, sample
from whet.models.load import load_config as load_model_config
from whet.planning.dtypes import with_dtypes
from whet.planning.machine import FreeMemory
from whet.plugins.planner.first import COMPILED, PLAIN, tokens_within
from whet.plugins.planner.fit import rooms
from whet.plugins.planner.memory import (
    Lengths,
    Memory,
    _update_bytes,
    bytes_per_logit,
    cache_room,
    micro_batch_tokens,
    mini_batch,
    plan_memory,
    rollout_bytes,
)
from whet.plugins.planner.outline import RowLength, TensorBytes
from whet.rollout.protocol import Request, SamplingParams
from whet.rollout.requirements import CacheRoom
from whet.trainers import build, sft

MakeConfig = Callable[..., TrainConfig]
# Two layers, two heads of 32 for keys and two for values, 4 bytes a number.
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4
NUMBERS = 14 * 128 + 4 * 384  # activations of a token in a layer, by hidden and inner size


def planned(config: TrainConfig, prompts: tuple[int, ...] = (16,)) -> Memory:
    return plan_memory(build.setup(config, prompts))


def item(memory: Memory, name: str, phase: str) -> int:
    return next((each.by_phase.get(phase, 0) for each in memory.items if each.name == name), 0)


def test_a_spread_has_the_longest_first_and_the_rest_as_they_come() -> None:
    assert Lengths((1, 9, 5, 3), 0).spread(2) == [9, 3]
    assert Lengths((4,), 0).spread(3) == [4, 4, 4]


def test_a_mini_batch_is_whole_prompts_of_one_process(train_config: MakeConfig) -> None:
    config = train_config({"actor.mini_batch_size": 2, "cluster.processes": 2})  # 4 answers to each of 2 prompts
    rows = mini_batch(config, "actor", Lengths((16, 10), 6))
    assert [(row.prompt, row.prompt_tokens, row.response_tokens) for row in rows] == [(1, 16, 6)] * 4


@pytest.mark.filterwarnings("error")
def test_examples_may_have_a_section_rollout(model_folder: Path) -> None:
    """A trainer of one's own may sample beside its examples; its rows are planned as if it did not."""

    class Samples(SFTConfig):
        rollout: RolloutConfig = RolloutConfig()

    words = [f"model.path={model_folder}", "data.train_batch_size=8"]
    plain, samples = (load_config(each, None, words, given={"data"}).config for each in (SFTConfig, Samples))
    rows = [mini_batch(each, "actor", Lengths((3, 5), 0)) for each in (plain, samples)]
    assert rows[0] == rows[1] and sum(row.tokens for row in rows[1]) == 4 * (3 + 5)


def test_blocks_of_the_cache_by_hand(train_config: MakeConfig, model_folder: Path) -> None:
    """A prompt of 20 and an answer of 6 fill two blocks: the first is shared by 4 answers, the second is each one's
    own, and the prompt has its own copy of it. For 4 prompts 4 x (2 + 4) blocks."""
    model = load_model_config(model_folder)
    config = train_config({"data.max_prompt_length": 20, "rollout.engine.options.kv_cache_bytes": 10**6})
    planned = rollout_bytes(config, model, Lengths((20,), 6))
    assert planned.cache == 10**6 // (16 * TOKEN_BYTES) * 16 * TOKEN_BYTES
    assert planned.written == 24 * 16 * TOKEN_BYTES
    assert (planned.prompt_rows, planned.prompt_tokens, planned.is_kept) == (4, 80, True)
    small = train_config({"rollout.engine.options.kv_cache_bytes": 5 * 16 * TOKEN_BYTES})
    planned = rollout_bytes(small, model, Lengths((20,), 6))
    assert planned.cache == planned.written == 5 * 16 * TOKEN_BYTES
    together = train_config({"rollout.max_batch_size": 4, "rollout.dtype": "bfloat16"})
    assert rollout_bytes(together, model, Lengths((20,), 6)).written == 6 * 16 * TOKEN_BYTES / 2
    # a server reserves it all at its start
    server = {"rollout.engine.name": "vllm", "rollout.engine.options.kv_cache_bytes": 10**12}
    planned = rollout_bytes(train_config(server), model, Lengths((20,), 6))
    assert planned.cache == planned.written == 10**12 and planned.smaller == {"kv_cache_bytes": 2**26}
    # hf: 16 rows of 26 tokens, and once more for the layer that grows
    planned = rollout_bytes(train_config({"rollout.engine.name": "hf"}), model, Lengths((20,), 6))
    assert planned.cache == planned.written == 16 * 26 * TOKEN_BYTES * 1.5
    assert (planned.prompt_rows, planned.prompt_tokens, planned.is_kept) == (16, 320, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"min_p": 0.1},
        {"top_k": 5, "temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5, "top_p": 0.9},
    ],
)
def test_bytes_of_a_logit_while_it_is_sampled_from(dtype: torch.dtype, options: dict[str, Any]) -> None:
    rows, vocabulary = 32, 5000
    request = Request(uid="", prompt_ids=(1,), params=SamplingParams(max_new_tokens=1, **options), key=0)
    state = SamplingState.of([request] * rows, vocabulary, torch.device("cpu"))
    with TensorBytes() as counted:
        logits = torch.zeros(rows, vocabulary, dtype=dtype)
        sample(logits, state, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 1, dtype=torch.int64))
    planned_bytes = bytes_per_logit(RolloutConfig(**options), dtype.itemsize) * rows * vocabulary
    assert counted.peak.total() == pytest.approx(planned_bytes, rel=0.05)


def test_what_each_phase_holds(train_config: MakeConfig) -> None:
    memory = planned(train_config({"algorithm.kl.where": "loss", "rollout.engine.options.kv_cache_bytes": 2**20}))
    weights = memory.weights["actor"] * 4
    assert memory.phases == ("rollout", "actor update")
    for phase in memory.phases:
        assert item(memory, "actor: weights", phase) == item(memory, "ref: weights", phase) == weights
        assert item(memory, "actor: optimizer", phase) == pytest.approx(2 * weights, rel=0.001)
    assert item(memory, "actor: gradients", "rollout") == weights  # of the step before
    assert item(memory, "actor: logits", "rollout") == item(memory, "rollout: logits", "actor update") == 0
    assert memory.untouched_bytes == item(memory, "rollout: KV cache", "rollout") - 4 * 5 * 16 * TOKEN_BYTES
    assert memory.tensor_bytes == max(sum(each.by_phase.get(p, 0) for each in memory.items) for p in memory.phases)
    assert memory.checkpoint_bytes == pytest.approx(3 * weights, rel=0.001)


def test_a_critic_and_a_second_module_come_on_top(train_config: MakeConfig) -> None:
    memory = planned(train_config({"algorithm.adv_estimator": "gae", "rollout.dtype": "bfloat16"}))
    assert memory.phases == ("rollout", "actor update", "critic update")
    assert item(memory, "rollout: weights", "rollout") == memory.weights["actor"] * 2
    critic = memory.weights["critic"] * 4
    assert item(memory, "critic: gradients", "actor update") == item(memory, "critic: weights", "rollout") == critic


def test_an_adapter_is_all_that_has_gradients_and_is_saved(train_config: MakeConfig) -> None:
    """Rank 4 in all seven matrices of two layers: 4 (rows + columns) each."""
    adapted = planned(train_config({"model.lora.rank": 4, "algorithm.kl.where": "loss"}))
    sides = [(128, 128), (128, 64), (128, 64), (128, 128), *[(128, 384)] * 3]
    count = 2 * 4 * sum(rows + columns for rows, columns in sides)
    assert item(adapted, "actor: gradients", "rollout") == 4 * count
    assert adapted.checkpoint_bytes == pytest.approx(3 * 4 * count, rel=0.01)
    assert item(adapted, "rollout: weights", "rollout") == 4 * adapted.weights["actor"]  # without the adapter
    assert "ref" not in adapted.weights  # the actor's own module, with the adapter off


def total(memory: Memory) -> int:
    return memory.total("actor update") - item(memory, "rollout: KV cache", "actor update")


LARGE = {"data.train_batch_size": 16, "data.max_response_length": 64, "actor.max_tokens_per_micro_batch": 2048}


@pytest.mark.slow
def test_smaller_micro_batches_and_recomputed_activations_save(train_config: MakeConfig) -> None:
    before = total(planned(train_config(LARGE)))
    for change in ({"actor.max_tokens_per_micro_batch": 512}, {"model.gradient_checkpointing": True}):
        assert total(planned(train_config(LARGE | change))) < 0.7 * before, change


def test_supervised_runs_have_one_phase(model_folder: Path, tmp_path: Path) -> None:
    overrides = {"model.path": str(model_folder), "data.train_batch_size": 8, "trainer.run_dir": str(tmp_path)}
    config = with_dtypes(load_config(SFTConfig, None, overrides, given={"data"}).config)
    memory = plan_memory(sft.SFTRun.setup(config, [30] * 8))
    assert memory.phases == ("actor update",) and memory.micro_batch_tokens == {"actor": 240}
    assert memory.untouched_bytes == 0


def test_shards_divide_what_lies_still_and_layers_are_gathered(train_config: MakeConfig, model_folder: Path) -> None:
    """Of two processes: half of weights, moments and gradients each; both layers and all outside them are whole."""
    whole, half = (
        planned(train_config({"cluster.processes": 2, "actor.engine.name": name})) for name in ("single", "fsdp")
    )
    for kind, during in (("weights", "rollout"), ("optimizer", "rollout"), ("gradients", "rollout")):
        assert item(half, f"actor: {kind}", during) == item(whole, f"actor: {kind}", during) // 2
    assert item(half, "actor: gathered weights", "actor update") == item(whole, "actor: weights", "rollout")
    assert item(whole, "actor: gathered weights", "actor update") == 0


# ---- an accelerator, and several pools

DEVICE = FreeMemory(2**33, "each accelerator")


def on_device(config: TrainConfig, pool: str | None = None) -> Memory:
    return plan_memory(replace(build.setup(config, (16,)), device=DEVICE), pool)


def there(memory: Memory, phase: str) -> dict[str, int]:
    return {each.name: each.by_phase[phase] for each in memory.items if each.on_device and phase in each.by_phase}


def test_what_an_accelerator_holds(train_config: MakeConfig) -> None:
    """All but the batch, and the weights that the host reads first are not counted twice."""
    memory = on_device(train_config({"algorithm.kl.where": "loss"}))
    weights = memory.weights["actor"] * 4
    assert {each.name for each in memory.items if not each.on_device} == {"batch columns"}
    found = there(memory, "rollout")
    assert found["actor: weights"] == found["ref: weights"] == found["actor: gradients"] == weights
    assert found["rollout: KV cache"] > 0 and memory.untouched_bytes == 0  # it is taken when it is made
    assert memory.device_tensor_bytes == max(sum(there(memory, phase).values()) for phase in memory.phases)
    assert memory.device_bytes == 2**30 + round(1.1 * memory.device_tensor_bytes)
    assert planned(train_config()).device_bytes == 0


def test_taking_turns_empties_the_accelerator_of_what_is_not_in_use(train_config: MakeConfig) -> None:
    changes = {"algorithm.kl.where": "loss", "rollout.free_cache_engine": True}
    memory = on_device(train_config(changes))
    assert set(there(memory, "rollout")) == {"actor: weights", "rollout: KV cache", "rollout: logits"}
    assert "rollout: KV cache" not in there(memory, "actor update")
    host = {each.name: each.by_phase for each in memory.items if not each.on_device}
    assert host["ref: weights"] == {"rollout": memory.weights["ref"] * 4} and "rollout" in host["actor: optimizer"]
    narrow = on_device(train_config({**changes, "rollout.dtype": "bfloat16"}))
    assert "actor: weights" not in there(narrow, "rollout")  # the rollout has its own
    assert there(narrow, "rollout")["rollout: weights"] == memory.weights["actor"] * 2
    host = {each.name: each.by_phase for each in narrow.items if not each.on_device}
    assert host["rollout: weights"] == {"actor update": memory.weights["actor"] * 2}


def test_offloaded_shards_lie_on_the_host(train_config: MakeConfig) -> None:
    engine = {"name": "fsdp", "options": {"cpu_offload": True}}
    memory = on_device(train_config({"cluster.processes": 2, "actor.engine": engine}))
    host = {each.name for each in memory.items if not each.on_device}
    assert host == {"actor: weights", "actor: optimizer", "actor: gradients", "batch columns"}
    assert {"actor: gathered weights", "actor: activations"} <= set(there(memory, "actor update"))


@pytest.mark.slow
def test_shards_are_gathered_in_the_dtype_of_products(train_config: MakeConfig) -> None:
    """One process: autocast makes narrow copies.  Shards: the layers are gathered narrow, and there are no copies."""
    shards = {"cluster.processes": 2, "actor.engine.name": "fsdp"}
    wide, narrow = (planned(train_config({**shards, "model.dtype": dtype})) for dtype in ("float32", "bfloat16"))
    gathered = [item(memory, "actor: gathered weights", "actor update") for memory in (wide, narrow)]
    assert gathered == [4 * wide.weights["actor"], 2 * wide.weights["actor"]]  # both layers are gathered at once
    assert item(narrow, "actor: weights in bfloat16", "actor update") == 0
    assert item(planned(train_config({"model.dtype": "bfloat16"})), "actor: weights in bfloat16", "actor update") > 0


def test_sequence_parallelism_divides_the_tokens_and_tensor_parallelism_only_the_weights(
    train_config: MakeConfig,
) -> None:
    def memory(**mesh: int) -> Memory:
        engine = {"name": "fsdp", "options": {"mesh": mesh}}
        return planned(train_config({"cluster.processes": 2, "actor.engine": engine}))

    together, tensor = memory(context=2), memory(tensor=2)
    assert together.micro_batch_tokens == tensor.micro_batch_tokens  # both ranks read all rows
    for kind in ("activations", "logits"):
        whole = item(tensor, f"actor: {kind}", "actor update")
        assert item(together, f"actor: {kind}", "actor update") == whole // 2 > 0
    assert memory().micro_batch_tokens["actor"] * 2 == together.micro_batch_tokens["actor"]


def test_a_replica_of_several_devices_divides_its_weights(train_config: MakeConfig) -> None:
    def sampling(devices: int) -> tuple[dict[str, int], Memory]:
        sample = {"processes": 1, "devices": devices, "roles": ["rollout"]}
        pools = {"train": {"processes": 1, "roles": ["actor"]}, "sample": sample}
        given = {"rollout.engine.name": "vllm", "rollout.max_staleness": 1, "algorithm.correction.weight": "importance"}
        setup = replace(build.setup(train_config({"cluster.placement": pools, **given}), (16,)), device=DEVICE)
        memory = plan_memory(setup, "sample")
        return there(memory, "rollout"), memory

    (one, first), (four, second) = sampling(1), sampling(4)
    for name in ("rollout: weights", "rollout: weights that arrive"):
        assert one[name] == 4 * four[name] > 0
    assert one["rollout: KV cache"] == four["rollout: KV cache"]  # vLLM's bytes are those of one device
    on_host = [item(memory, "rollout: weights for restarts", "rollout") for memory in (first, second)]
    assert on_host == [one["rollout: weights"]] * 2


def test_each_pool_is_planned_for_the_roles_in_it(train_config: MakeConfig) -> None:
    pools = {"train": {"processes": 2, "roles": ["actor"]}, "sample": {"processes": 1, "roles": ["rollout", "ref"]}}
    setup = build.setup(train_config({"cluster.placement": pools, "algorithm.kl.where": "loss"}), (16,))
    train, sample = (plan_memory(setup, name) for name in pools)
    assert train.phases == ("actor update",) and set(train.weights) == {"actor"}
    assert sample.phases == ("rollout",) and set(sample.weights) == {"ref"}
    assert {each.name for each in sample.items} == {
        *("ref: weights", "rollout: weights", "rollout: KV cache", "rollout: logits"),
    }  # the actor's module is in other processes
    assert train.checkpoint_bytes == sample.checkpoint_bytes > 0
    [host] = rooms(setup)
    assert host.needed == 2 * train.resident_bytes + sample.resident_bytes and host.processes == 3
    host, first, second = rooms(replace(setup, device=DEVICE))
    assert (first.name, second.name) == ("each accelerator of the pool train", "each accelerator of the pool sample")
    assert first.needed > 2**30 and first.memory.phases == ("actor update",)


def test_weights_that_arrive_while_others_sample_are_a_copy_more(train_config: MakeConfig) -> None:
    apart = {"cluster.placement": {"a": {"roles": ["actor"]}, "b": {"roles": ["rollout"]}}}
    stale = {**apart, "rollout.max_staleness": 1, "algorithm.correction.weight": "importance"}
    synchronous, ahead = (plan_memory(build.setup(train_config(each), (16,)), "b") for each in (apart, stale))
    weights = item(synchronous, "rollout: weights", "rollout")
    assert item(ahead, "rollout: weights that arrive", "rollout") == weights > 0
    assert item(synchronous, "rollout: weights that arrive", "rollout") == 0
    assert item(ahead, "rollout: logits", "rollout") > item(synchronous, "rollout: logits", "rollout"), "more at once"


def test_the_cache_leaves_to_training_what_formulas_count(train_config: MakeConfig) -> None:
    """Beside the cache: the phase that needs most of all else.  At the most: 16 sequences of 22 tokens."""

    def room(**changes: Any) -> tuple[Memory, CacheRoom | None]:
        setup = replace(build.setup(train_config(changes), (16,)), device=DEVICE)
        return plan_memory(setup), cache_room(setup)

    most = 16 * 22 * TOKEN_BYTES
    memory, found = room(**{"algorithm.kl.where": "loss"})
    update = there(memory, "actor update")
    logits = 1024 * 64 * 24
    held = sum(update[name] for name in ("actor: weights", "actor: optimizer", "ref: weights"))
    activations = 1.2 * 8 * NUMBERS * (4 * 16 + 16 * 6)  # of four prompts, each with four answers
    assert found == CacheRoom(held + max(logits, update["actor: weights"]) + round(activations), most)
    traced = sum(size for name, size in update.items() if name != "rollout: KV cache")
    assert 0.9 < traced / found.beside < 1.1
    memory, found = room(**{"rollout.free_cache_engine": True, "rollout.dtype": "bfloat16"})
    sampling = there(memory, "rollout")
    assert found == CacheRoom(sampling["rollout: weights"] + sampling["rollout: logits"], most / 2)
    assert room(**{"rollout.engine.options.kv_cache_bytes": 2**30})[1] is None
    assert room(**{"rollout.engine.name": "hf"})[1] is None
    assert cache_room(build.setup(train_config(), (16,))) is None
    set_size = planned(train_config({"rollout.engine.options.kv_cache_bytes": 2**30}))
    assert planned(train_config()) == set_size  # on a host `auto` is that number


def test_tokens_of_a_micro_batch_by_hand() -> None:
    """Two layers in float32: 8 bytes for each of their numbers.  Recomputed: inputs of both, and twice one layer."""
    assert PLAIN.bytes_of_token(128, 384, 2, 4, recomputes=False) == 8 * NUMBERS
    assert PLAIN.bytes_of_token(128, 384, 2, 4, recomputes=True) == 4 * (2 * 128 + 2 * NUMBERS)
    assert COMPILED.bytes_of_token(128, 384, 2, 2, recomputes=False) == 4 * (4 * 128 + 2 * 384)
    assert tokens_within(1_000_000, 150_000, 100) == 5632  # 600,000 up to three quarters: 6,000, in whole 512s
    assert tokens_within(1_000_000, 800_000, 100) == 512  # half of what is left: 1,000
    assert tokens_within(1_000_000, 2_000_000, 100) == 512
    assert tokens_within(10**12, 0, 100) == 32_768


@pytest.mark.slow
def test_micro_batches_fill_what_an_accelerator_has_beside_all_else(train_config: MakeConfig) -> None:
    """With room for ten times the held bytes, micro-batches get three quarters of it, less the held bytes."""
    common = {"algorithm.kl.where": "loss", "rollout.engine.options.kv_cache_bytes": 2**20}

    def tokens(total: int, name: str = "actor", changes: dict[str, int] | None = None) -> int:
        setup = build.setup(train_config(common | (changes or {})), (16,))
        return micro_batch_tokens(replace(setup, device=FreeMemory(2**40, "each accelerator", total)), name)

    found = there(on_device(train_config(common)), "actor update")
    names = ("actor: weights", "actor: optimizer", "ref: weights", "rollout: KV cache")
    others, gradients, logits = sum(found[name] for name in names), found["actor: weights"], 1024 * 64 * 24
    held = others + max(gradients, logits)
    total = 2**30 + round(1.1 * 10 * held)
    assert tokens(total) == int(6.5 * held / (8 * NUMBERS)) // 512 * 512
    assert tokens(total, "ref") == int((7.5 * held - others - logits) / (8 * NUMBERS)) // 512 * 512
    assert tokens(2 * total) > tokens(total) > tokens(total - 40 * held // 10) >= 512
    assert tokens(2**40) == 32_768 and tokens(2**30) == 512
    assert tokens(0) == 16_384  # an accelerator whose memory is not known
    assert tokens(total, changes={"actor.max_tokens_per_micro_batch": 100}) == 100
    assert micro_batch_tokens(build.setup(train_config(common), (16,)), "actor") == 2048


@pytest.mark.slow
def test_a_plan_has_micro_batches_of_that_size(train_config: MakeConfig) -> None:
    """64 rows of 150 tokens: two of the largest size that fits."""
    large = {
        "data.max_response_length": 134,
        "data.train_batch_size": 16,
        "rollout.engine.options.kv_cache_bytes": 2**20,
    }
    setup = build.setup(train_config(large), (16,))
    whole = 16 * (16 + 4 * 134)  # prompts are shared
    sizes = {}
    for total in (2**40, 2**30 + 2**28):
        there = replace(setup, device=FreeMemory(2**40, "each accelerator", total))
        sizes[plan_memory(there).micro_batch_tokens["actor"]] = micro_batch_tokens(there, "actor")
    (all_rows, most), (fewer, budget) = sizes.items()
    assert all_rows == whole < most == 32_768
    assert budget - 150 < fewer <= budget < whole


def test_shares_of_an_update_are_compared_as_they_are_in_a_process(train_config: MakeConfig) -> None:
    """A large first micro-batch without gradients, and a small later one with them: of the second the whole has more,
    of two shards each has less."""

    class Large:
        role = build.setup(train_config(), (16,)).roles["actor"]

        def update_bytes(self, rows: list[RowLength], needs: frozenset[str], *, accumulates: bool) -> Counter[str]:
            tokens = sum(row.tokens for row in rows)
            return Counter(activations=tokens, gradients=1000 * accumulates, logits=1)

    split = [[RowLength(0, 10, 790)], [RowLength(1, 10, 190)]]
    found = [
        _update_bytes(Large(), split, frozenset(), {"activations": 1, "gradients": shards})  # type: ignore[arg-type]
        for shards in (1, 2)
    ]
    assert found == [{"activations": 200, "gradients": 1000}, {"activations": 800, "gradients": 0}]
