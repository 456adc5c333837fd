# SPDX-License-Identifier: Apache-2.0
import re
import time

import numpy as np
from hypothesis import given, strategies as st

from tests.raising import raises
from whet.config.schema import TrainerConfig
from whet.data.loader import OrderLoader, PromptLoader, run_steps
from whet.errors import DataError
from whet.keyed import key
from whet.types import Prompt


def prompts(n: int) -> list[Prompt]:
    """Row numbers are twice the position, as if every other row had been dropped."""
    return [Prompt(f"0:{2 * i}", 2 * i, (), (i,), "test", None) for i in range(n)]


def uids(loader: PromptLoader, n: int) -> list[str]:
    return [prompt.uid for prompt in loader.take(n)]


def test_without_shuffle_rows_come_in_order_and_uids_name_the_epoch() -> None:
    loader = PromptLoader(prompts(3), seed=0, shuffle=False)
    assert uids(loader, 2) == ["0:0", "0:2"]
    assert uids(loader, 6) == ["0:4", "1:0", "1:2", "1:4", "2:0", "2:2"]
    assert loader.take(1)[0].token_ids == (2,)


def test_the_order_of_an_epoch_is_the_keyed_permutation() -> None:
    loader = PromptLoader(prompts(50), seed=5)
    epochs = [loader.take(50) for _ in range(2)]
    for epoch, taken in enumerate(epochs):
        expected = np.random.Generator(np.random.PCG64(key(5, "shuffle", epoch))).permutation(50)
        assert [prompt.token_ids[0] for prompt in taken] == expected.tolist()
        assert sorted(prompt.index for prompt in taken) == list(range(0, 100, 2))
    assert [p.index for p in epochs[0]] != [p.index for p in epochs[1]]
    assert [p.index for p in PromptLoader(prompts(50), seed=6).take(50)] != [p.index for p in epochs[0]]


@given(
    num_prompts=st.integers(1, 7), before=st.integers(0, 20), after=st.integers(0, 20), cut=st.integers(0, 20),
    shuffle=st.booleans(),
)  # fmt: skip
def test_resuming_continues_the_same_order_however_it_is_taken(
    num_prompts: int, before: int, after: int, cut: int, shuffle: bool
) -> None:
    whole = uids(PromptLoader(prompts(num_prompts), seed=1, shuffle=shuffle), before + after)
    stopped = PromptLoader(prompts(num_prompts), seed=1, shuffle=shuffle)
    head = uids(stopped, min(cut, before)) + uids(stopped, before - min(cut, before))
    resumed = PromptLoader(prompts(num_prompts), seed=1, shuffle=shuffle)
    resumed.load_state(stopped.state())
    assert head + uids(resumed, after) == whole
    epoch, index = divmod(before, num_prompts)
    assert stopped.state() == {"epoch": epoch, "index": index}


def test_row_numbers_come_in_the_order_of_the_prompts() -> None:
    order, loader = OrderLoader(range(5), seed=3), PromptLoader(prompts(5), seed=3)
    pairs = order.take_named(12)
    assert [f"{name}:{2 * row}" for name, row in pairs] == uids(loader, 12)
    assert order.state() == loader.state() == {"epoch": 2, "index": 2}
    assert OrderLoader(range(5), seed=3).take(12) == [row for _, row in pairs]


def test_a_state_of_more_prompts_is_refused() -> None:
    loader = PromptLoader(prompts(4), seed=0)
    loader.take(3)
    with raises(DataError, key="checkpoint", found=re.compile("row 3 .* of 3 ")):
        PromptLoader(prompts(3), seed=0).load_state(loader.state())


def test_an_epoch_has_whole_steps() -> None:
    once = TrainerConfig(total_epochs=1)
    assert [run_steps(once, 10, n) for n in (1, 3, 5, 10, 11)] == [10, 3, 2, 1, 1]


def test_no_prompts_are_refused() -> None:
    with raises(DataError, key="number of rows", found=0):
        PromptLoader([], seed=0)


def test_a_million_rows_start_and_resume_at_once() -> None:
    rows = prompts(1) * 1_000_000
    start = time.process_time()
    loader = PromptLoader(rows, seed=0)
    loader.load_state({"epoch": 3, "index": 999_999})
    assert [prompt.uid for prompt in loader.take(2)] == ["3:0", "4:0"]
    assert time.process_time() - start < 1.0
