# SPDX-License-Identifier: Apache-2.0
"""Files that are made to take all time or memory of `whet config convert`, or to break it: one error, or a recipe."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet.plugins.migration.convert import convert
from whet.plugins.migration.foreign_files import read

ESTIMATOR = "algorithm: {adv_estimator: grpo}\n"
USED = "GRPOConfig(run_name=A40, beta=0.1)\n"
COMMAND = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=$A x=1\n"
TRL = "from trl import GRPOConfig\n"
CHAIN = range(40)


def chained(line: str) -> str:
    return "".join(line.replace("NEXT", str(each + 1)).replace("LAST", str(each)) for each in CHAIN)


# By name: the file, and whether it is refused.
FAST = {
    "doubled.sh": ("A=xx\n" + "A=$A$A\n" * 34 + COMMAND, True),
    "appended.sh": ("A=xx\n" + "A+=$A\n" * 40 + COMMAND, True),
    "recursion.sh": ("f() { f; f; }\nf\n" + COMMAND, True),
    "multiplied.py": (f"{TRL}GRPOConfig(beta=0.1, run_name='x' * 9999999999)\n", False),
    "shifted.py": (f"{TRL}GRPOConfig(beta=10**10**10, epsilon=1 << 99999999999)\n", True),
    "squared.py": (
        f"{TRL}A0 = 3\n" + chained("ANEXT = ALAST * ALAST\n") + "GRPOConfig(beta=A40, epsilon=0.1)\n",
        False,
    ),
    "aliases.yaml": ("a0: &a0 [1, 1]\n" + chained("aNEXT: &aNEXT [*aLAST, *aLAST, *aLAST]\n"), True),
    "sexagesimal.yaml": (f"{ESTIMATOR}trainer: {{total_epochs: {'1:' * 9999}1}}\n", True),
    "hexadecimal.py": (f"{TRL}GRPOConfig(beta=0x{'f' * 9999})\n", True),
    "nested.sh": (f"A={'$(' * 5000}echo{')' * 5000}\n{COMMAND}", True),
    "word.sh": (f"A={'x' * 800_000}\n{COMMAND}", True),
    "bytes.sh": (f"# {'x' * 2**20}\n{COMMAND}", True),
    "not_a_notebook.ipynb": ("[]", True),
    "cell_without_source.ipynb": ('{"cells": [{"cell_type": "code"}]}', True),
    "other_types.yaml": (
        "data: {train_batch_size: x, max_response_length: [1], train_files: {a: 1}}\n"
        "actor_rollout_ref: {actor: {ppo_mini_batch_size: {a: 1}, optim: {lr_warmup_steps: y}}, rollout: {n: 0}}\n"
        "trainer: {n_gpus_per_node: q, nnodes: 0}\nalgorithm: {adv_estimator: {a: 1}}\n",
        False,
    ),
    "zeros.yaml": (
        "actor_rollout_ref: {actor: {ppo_mini_batch_size: 0}, rollout: {n: 0, tensor_model_parallel_size: 0}}\n"
        "trainer: {n_gpus_per_node: 0, nnodes: 0}\nasync_training: {require_batches: 0}\n"
        "rollout: {nnodes: 0, n_gpus_per_node: 8, total_rollout_steps: 9}\n",
        False,
    ),
}
SLOW = {
    "array.sh": ("A=(1 2)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 34 + COMMAND, True),
    "sums.py": (f"{TRL}A0 = 'xx'\n" + chained("ANEXT = ALAST + ALAST\n") + USED, True),
    "lists.py": (f"{TRL}A0 = [1]\n" + chained("ANEXT = [ALAST, ALAST]\n") + USED, True),
    "loops.sh": ("for i in {1..9999}; do for j in {1..9999}; do A=$j; done; done\n" + COMMAND, True),
    "while.sh": ("i=0\nwhile [ $i -lt 99999999 ]; do i=$((i+1)); done\n" + COMMAND, True),
    "endless.sh": ("while true; do A=1; done\n" + COMMAND, True),
    "functions.sh": ("f0() { A=1; }\n" + chained("fNEXT() { fLAST; fLAST; fLAST; }\n") + "f25\n" + COMMAND, True),
    "eval.sh": ('x="eval \\$x"\neval $x\n' + COMMAND, True),
    "eval_of_functions.sh": ("f() { eval 'f; f'; }; f\n" + COMMAND, True),
    "numbers.sh": ("A=$(seq 1 999999999)\n" + COMMAND, False),
    "braces.sh": ("for i in {1..999999999999}; do A=$i; done\n" + COMMAND, True),
    "variables.sh": (f"A={'$B' * 400_000}\n{COMMAND}", True),
    "escapes.sh": (f'A="{chr(92) * 800_000}"\n{COMMAND}', True),
    "defaults.sh": (f"A={'${B:-' * 5000}{'}' * 5000}\n{COMMAND}", True),
    "ifs.sh": ("if true; then " * 3000 + "A=1" + "; fi" * 3000 + "\n" + COMMAND, True),
    "powers.sh": ("A=$((9**9**9**9))\n" + COMMAND, False),
    "squares.sh": ("A=3\n" + "A=$((A*A))\n" * 60 + COMMAND, False),
    "replaced.sh": ("A=a\n" + "A=${A//a/aaaaaaaaaa}\n" * 20 + COMMAND, True),
    "expression.sh": (f"B={'a' * 150}\nif [[ $B =~ ^(a+)+$b ]]; then A=1; fi\n{COMMAND}", False),
    "pattern.sh": (f"B={'a' * 2000}\nif [[ $B == {'*a' * 14}b ]]; then A=1; fi\n{COMMAND}", False),
    "branches.sh": ("".join(f'if [ "$V{each}" = 1 ]; then A={each}; fi\n' for each in range(400)) + COMMAND, True),
    "no_program.sh": ("".join(f'if [ "$V{each}" = 1 ]; then A={each}; fi\n' for each in CHAIN), True),
    "patterns.sh": (f"case $X in {''.join(f'v{each}) A={each};; ' for each in range(5000))} esac\n{COMMAND}", True),
    "references.yaml": ("a0: xx\n" + chained("aNEXT: '${aLAST}${aLAST}'\n") + ESTIMATOR, True),
    "sections.yaml": ("a0: {x: 1, y: 2}\n" + chained("aNEXT: {x: '${aLAST}', y: '${aLAST}'}\n"), True),
    "itself.yaml": ("a: ${a}\nb: ${c}x\nc: ${b}x\nalgorithm: {adv_estimator: grpo}\n", False),
    "around.yaml": (ESTIMATOR + "x:\n" + "".join(f"  k{each}: '${{x}}'\n" for each in range(2000)), True),
    "deep.yaml": ("algorithm: {adv_estimator: grpo}\na: " + "[" * 5000 + "]" * 5000 + "\n", True),
    "defaults.yaml": ("defaults: [defaults, defaults]\nalgorithm: {adv_estimator: grpo}\n", False),
    "deep.ipynb": ('{"cells": ' + "[" * 3000 + "]" * 3000 + "}", True),
    "minus.py": (f"{TRL}GRPOConfig(beta={'-' * 5000}1)\n", True),
    "attributes.py": (f"x = {'a.' * 100_000}b\nGRPOConfig(beta=0.1)\n", True),
    "devices.yaml": ("actor_train: {device_mapping: 'list(range(0,999999999999))'}\nrollout_batch_size: 8\n", False),
    "types_of_roll.yaml": (
        "rollout_batch_size: [a]\nrewards: 3\nadv_estimator: [1]\nnum_return_sequences_in_group: none\n"
        "actor_train: {device_mapping: {a: 1}, training_args: {per_device_train_batch_size: x}}\n",
        False,
    ),
}  # fmt: skip


def end_of(name: str, text: str, folder: Path) -> str | None:
    """The error, if there is one; no other exception, at most 10 processor seconds, at most half a GiB more."""
    file = folder / name
    file.write_text(text)
    system = "roll" if "rollout_batch_size" in text else "trl" if file.suffix in (".py", ".ipynb") else "verl"
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        convert(read(str(file), system), system).to_yaml()
        error = None
    except ConfigError as raised:
        error = str(raised)
    assert time.process_time() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19
    return error


@pytest.mark.parametrize("name", FAST)
def test_a_file_beyond_a_limit_is_one_error(name: str, tmp_path: Path) -> None:
    text, is_refused = FAST[name]
    error = end_of(name, text, tmp_path)
    assert (error is not None) == is_refused and len((error or "").splitlines()) <= 1 and len(error or "") < 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_further_files_beyond_a_limit_are_one_error(name: str, tmp_path: Path) -> None:
    text, is_refused = SLOW[name]
    error = end_of(name, text, tmp_path)
    if "choose" not in (error or ""):  # a choice lists values, line by line
        assert (error is not None) == is_refused and len((error or "").splitlines()) <= 1 and len(error or "") < 1000


def test_a_command_in_words_has_the_same_limits() -> None:
    with pytest.raises(ConfigError) as raised:
        read("A=xx\n" + "A=$A$A\n" * 34 + COMMAND, "verl")
    assert len(str(raised.value)) < 400
