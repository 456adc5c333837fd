# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from benchmarks.setting import FULL, QUICK
from benchmarks.workload import Answers, make_workload, score


def test_lengths_are_fixed_and_reach_the_longest() -> None:
    answers = Answers(prompts=16, n=8, shortest=16, longest=512)
    assert answers.lengths == answers.lengths
    assert len(answers.lengths) == 128
    assert max(answers.lengths) == 512 and min(answers.lengths) >= 16
    assert 230 < sum(answers.lengths) / 128 < 300  # uniform: 264
    assert set(Answers(8, 8, 64, 64).lengths) == {64}


def test_prompts_are_of_16_to_64_tokens_and_shared_by_their_answers(tmp_path: Path) -> None:
    work = make_workload(tmp_path, size="nano", num_layers=1, vocab_size=512, prompts=FULL.prompts)
    assert all(16 <= len(ids) <= 64 for ids in work.token_ids)
    assert len(set(work.texts)) == FULL.prompts
    requests = work.requests(Answers(2, 3, 5, 5))
    assert [prompt for prompt, _ in requests] == [work.token_ids[0]] * 3 + [work.token_ids[1]] * 3
    assert [length for _, length in requests] == [5] * 6


def test_a_request_can_be_among_128_others() -> None:
    assert FULL.exactness.prompts * FULL.exactness.n > 128
    assert QUICK.prompts <= FULL.prompts


def test_the_reward_is_the_share_of_vowels() -> None:
    assert score("abcde") == 0.4
    assert score("") == 0.0
