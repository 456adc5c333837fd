# SPDX-License-Identifier: Apache-2.0
"""Forms in which commands and scripts of other frameworks are written, and the report for unknown values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.migration.published import converted
from tests.raising import check_fields, raises
from whet.errors import ConfigError
from whet.plugins.migration.convert import Converted, convert
from whet.plugins.migration.foreign_files import Written, read
from whet.plugins.migration.foreign_shell_language import OTHER

MAIN = "python3 -m verl.trainer.main_ppo"


@pytest.mark.parametrize(
    "command",
    [
        f"{MAIN} data.shuffle=True actor.lr=1e-6",
        f"PYTHONUNBUFFERED=1 X=2 {MAIN} data.shuffle=True actor.lr=1e-6 2>&1 | tee verl_demo.log",
        f"nohup {MAIN} data.shuffle=True actor.lr=1e-6 > train.log 2>&1 &",
        f"env HYDRA_FULL_ERROR=1 {MAIN} data.shuffle=True actor.lr=1e-6",
        f"srun --nodes=2 --gres=gpu:8 {MAIN} data.shuffle=True actor.lr=1e-6",
        "torchrun --nproc_per_node=8 --nnodes 2 -m verl.trainer.main_ppo data.shuffle=True actor.lr=1e-6",
        "python -m torch.distributed.run --nproc-per-node 8 train.py data.shuffle=True actor.lr=1e-6",
        "deepspeed --num_gpus 8 train.py data.shuffle=True actor.lr=1e-6",
        f"ray job submit --no-wait --runtime-env=a.yaml --working-dir . -- {MAIN} data.shuffle=True actor.lr=1e-6",
    ],
)
def test_words_of_launchers_are_no_keys(command: str) -> None:
    assert read(command, "verl") == Written({"data.shuffle": True, "actor.lr": 1e-6})


@pytest.mark.parametrize(
    ("command", "values"),
    [
        ("trl grpo --learning_rate=1e-5 --loss-type=dr-grpo", {"learning_rate": 1e-5, "loss_type": "dr-grpo"}),
        ("trl grpo --lora-r 8 --use_peft --run-name=a-b", {"lora_r": 8, "use_peft": True, "run_name": "a-b"}),
        ("accelerate launch --num_processes 4 grpo.py --beta 0.1", {"num_processes": 4, "beta": 0.1}),
        ("torchrun --nproc-per-node=2 grpo.py --beta 0.1", {"num_processes": 2, "beta": 0.1}),
        ("python grpo.py --beta 0.1", {"beta": 0.1}),
    ],
)  # fmt: skip
def test_flags(command: str, values: dict[str, Any]) -> None:
    assert read(command, "trl") == Written(values)


def test_the_keys_of_a_config_that_is_named_by_hydra_lie_below(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("data: {shuffle: false, seed: 3}\n")
    script = tmp_path / "run.sh"
    script.write_text(f"{MAIN} --config-path=conf --config-name='mine.yaml' \\\n  data.shuffle=True a.b=1\n")
    assert read(str(script), "verl") == Written({"data.shuffle": True, "data.seed": 3, "a.b": 1})
    script.write_text(f"{MAIN} --config-path conf --config-name mine data.shuffle=True a.b=1\n")
    assert read(str(script), "verl").values == {"data.shuffle": True, "data.seed": 3, "a.b": 1}
    script.write_text(f"{MAIN} --config-name=ppo_megatron_trainer a.b=1\n")
    missing = "ppo_megatron_trainer.yaml is not here: its keys are missing; the values of the published file stand in"
    found = read(str(script), "verl")
    assert found.values["actor_rollout_ref.actor.strategy"] == "megatron"
    assert found.unread == [f"{missing} their place"]
    script.write_text(f"{MAIN} --config-name=sppo_config a.b=1\n")
    missing = "sppo_config.yaml is not here: its keys are missing; the defaults of verl stand in their place"
    assert read(str(script), "verl") == Written({"a.b": 1}, [missing])


def test_the_published_config_of_easyr1_stands_in_where_it_is_not_there() -> None:
    found = read("python3 -m verl.trainer.main config=examples/config.yaml worker.actor.optim.lr=2e-6", "easyr1")
    assert found.unread == [
        "examples/config.yaml is not here: its keys are missing; the values of the published file stand in their place"
    ]
    names = ("worker.rollout.n", "algorithm.kl_coef", "worker.actor.optim.lr", "data.prompt_key")
    assert [found.values[name] for name in names] == [5, 0.01, 2e-6, "problem"]


CASE = """
MODE={mode}
case "$MODE" in
  small|tiny) N=2 ;;
  "big") N=8
    LR=1e-5
    ;;
  x*) N=16;;
  *) N=4 ;;
esac
python3 -m verl.trainer.main_ppo rollout.n=$N lr=${{LR:-1e-6}}
"""


@pytest.mark.parametrize(
    ("mode", "n", "rate"), [("tiny", 2, 1e-6), ("big", 8, 1e-5), ("xl", 16, 1e-6), ("other", 4, 1e-6)]
)
def test_case_takes_the_branch_whose_pattern_matches(mode: str, n: int, rate: float) -> None:
    assert read(CASE.format(mode=mode), "verl") == Written({"rollout.n": n, "lr": rate})


def test_case_of_an_unknown_value_is_a_choice() -> None:
    """Without an argument the last branch is taken; `small` and `tiny` share a branch, and x, which x* matches, has
    another."""
    found = read(CASE.format(mode="$1"), "verl")
    rates = {name: each["lr"] for name, each in found.branches["MODE"].items()}
    numbers = {name: each["rollout.n"] for name, each in found.branches["MODE"].items()}
    assert numbers == {"": 4, "small": 2, "tiny": 2, "big": 8, "x": 16, OTHER: 4} and found.unread == []
    assert rates == {"": 1e-6, "small": 1e-6, "tiny": 1e-6, "big": 1e-5, "x": 1e-6, OTHER: 1e-6}
    for name, value in (("MODE", "big"), ("1", "big")):
        assert read(CASE.format(mode="$1"), "verl", {name: value}) == Written({"rollout.n": 8, "lr": 1e-5})


def test_a_case_of_one_branch_is_a_choice_too() -> None:
    """N is 16 on one kind of machine, 8 on all others, which no pattern names; a `*` that ends the script is no way."""
    script = "N=8\ncase $(uname -m) in aarch64) N=16 ;;{rest} esac\npython3 -m verl.trainer.main_ppo rollout.n=$N"
    for rest, others in (("", {OTHER: 8}), (" *) exit 1 ;;", {})):
        [ways] = read(script.format(rest=rest), "verl").branches.values()
        assert {value: each["rollout.n"] for value, each in ways.items()} == {"aarch64": 16} | others


@pytest.mark.parametrize(
    ("words", "processes"),
    [("torchrun --nnodes 2 --nproc-per-node=4", 8), ("accelerate launch --num_machines 2 --num_processes 6", 6),
     ("deepspeed --num_gpus 3 --num_nodes=2", 6), ("torchrun --nnodes=1:4 --nproc_per_node 5", 5)],
)  # fmt: skip
def test_processes_of_all_nodes_count(words: str, processes: int) -> None:
    assert read(f"{words} train.py --num_generations 4", "trl").values["num_processes"] == processes


def test_files_that_a_script_reads_are_told_but_for_its_environment() -> None:
    script = (
        'source ~/miniconda3/bin/activate x\n. "$HOME/.bashrc"\nsource $DIR/env.sh\nverl main_ppo rollout.n=${N:-4}'
    )
    assert [line.split(":")[0] for line in read(script, "verl").unread] == ["source $DIR/env.sh"]


FUNCTIONS = """
set -euo pipefail
run() {
  local model=$1; shift
  python3 -m verl.trainer.main_ppo model.path=$model rollout.n=${1:-7} steps=${2:-9} "${@:3}" a.b=1
}
function main {
  export SEED=3
  run Qwen/Q 4
}
main "$@"
"""


def test_a_function_is_read_where_it_is_called_with_its_arguments() -> None:
    assert read(FUNCTIONS, "verl").values == {"model.path": "Qwen/Q", "rollout.n": 4, "steps": 9, "a.b": 1}
    assert read("go() { python3 -m v a.b=$1 $2 ; }\ngo 5 c.d=x", "verl") == Written({"a.b": 5, "c.d": "x"})
    twice = read("go() {\n  python3 -m v a.b=$1\n}\ngo 5\ngo 6\n", "verl")
    assert twice == Written({"a.b": 5}, ["`python3 -m v` is run more than once: the recipe is that of one run"])


SWEEP = """
HERE=$(cd -- "$(dirname "${BASH_SOURCE[0]}")" &> /dev/null && pwd)
SIZES=(1.5B 7B)
EXTRA=""
for each in {1..2}; do EXTRA="$EXTRA +tags.t$each=$((each * 2))"; done
for lr in 1e-6 5e-7; do
    for size in "${SIZES[@]}"; do
        if [ $size = 7B ]; then TP=4; else TP=1; fi
        name=$(basename Qwen/Qwen2.5-$size)_lr${lr}_$(date +%m%d)
        python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-$size \\
            actor_rollout_ref.actor.optim.lr=$lr rollout.tp=$TP trainer.experiment_name=$name \\
            data.train_files=$HERE/../data/train.parquet $EXTRA
    done
done
"""


def test_a_loop_around_a_command_is_read_in_its_first_turn_and_the_others_apart(tmp_path: Path) -> None:
    script = tmp_path / "sweep.sh"
    script.write_text(SWEEP)
    found = read(str(script), "verl")
    first = {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-1.5B",
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "rollout.tp": 1,
        "trainer.experiment_name": "Qwen2.5-1.5B_lr1e-6_DATE",
        "data.train_files": f"{tmp_path}/../data/train.parquet",
        "tags.t1": 2,
        "tags.t2": 4,
    }
    assert found.values == first
    slower = {"actor_rollout_ref.actor.optim.lr": 5e-7, "trainer.experiment_name": "Qwen2.5-1.5B_lr5e-7_DATE"}
    larger = {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B", "rollout.tp": 4}
    assert found.loops == {
        "for lr in 1e-6 5e-7": [first | slower],
        "for size in 1.5B 7B": [first | larger | {"trainer.experiment_name": "Qwen2.5-7B_lr1e-6_DATE"}],
    }
    [line] = found.unread
    assert line.startswith("trainer.experiment_name: DATE ") and "`$(date +%m%d)`" in line
    told = [line for line in convert(found, "verl").check if "turn" in line or " -m " in line]
    assert told == [
        "`for lr in 1e-6 5e-7`: the recipe has the first turn's values; over all turns: actor.optim.lr=1e-06,5e-07",
        "`for size in 1.5B 7B`: the recipe has the first turn's values; "
        "over all turns: model.path=Qwen/Qwen2.5-1.5B,Qwen/Qwen2.5-7B",
        "to run all turns of the loops: whet train RECIPE "
        "-m actor.optim.lr=1e-06,5e-07 model.path=Qwen/Qwen2.5-1.5B,Qwen/Qwen2.5-7B",
    ]


def test_keys_that_a_loop_changes_together_are_no_sweep() -> None:
    case = 'case "$m" in *7B) lr=1e-6 ;; *) lr=5e-6 ;; esac'
    script = (
        f"for m in Q-1B Q-7B\ndo\n{case}\ntrl grpo --model_name_or_path $m --learning_rate $lr --num_processes 1\ndone"
    )
    told = [line for line in convert(read(script, "trl"), "trl").check if "turn" in line or " -m " in line]
    assert told == [
        "`for m in Q-1B Q-7B`: the recipe has the first turn's values; over all turns: "
        "actor.optim.lr=5e-06,1e-06 model.path=Q-1B,Q-7B, which change together: run each pair of values by itself"
    ]


@pytest.mark.parametrize(
    ("loop", "n"),
    [
        ("for i in 1 2; do N=$i; done", 2),
        ("for i in `seq 2 2 7`; do N=$i; done", 6),
        ("for i in {9..8..-1}; do N=$i; done", 8),
        ("N=1\nfor i in 2 3\ndo\n  for j in 2; do\n    N=$((N * i * j))\n  done\ndone", 24),
        ("if [ 1 = 2 ]; then\n  for i in $(ls); do N=$i; done\nfi\nN=5", 5),
    ],
)
def test_a_loop_that_only_assigns_is_carried_out(loop: str, n: int) -> None:
    assert read(f"{loop}\n{MAIN} rollout.n=$N a.b=1\n", "verl") == Written({"rollout.n": n, "a.b": 1})


@pytest.mark.parametrize(
    "loop", ["for m in *.yaml", "for m in $(ls)", "for m in $ALL", "while read m", "until test -f m"]
)
def test_a_loop_over_what_is_not_known_is_told(loop: str) -> None:
    found = read(f"{loop}; do\n  {MAIN} a.b=$m c=1\ndone", "verl")
    assert found.values == {"c": 1} and found.loops == {}
    head = " ".join(loop.split()[:4])
    assert found.unread == [
        "a.b=$m: variable m is not set in the script",
        f"`{head}`: not decided; all assignments in it were carried out, in order",
    ]


@pytest.mark.slow
def test_loops_end() -> None:
    found = read(f"for i in {{1..200}}; do {MAIN} a=$i b=1; done", "verl")
    assert [each["a"] for each in found.loops.popitem()[1]] == list(range(2, 101))
    assert found.unread == ["`for i` has 200 turns, of which the first 100 were read"]
    loops = "for i in {1..9999}; do for j in {1..9999}; do N=$j; done; done\n"
    with raises(ConfigError, "the command", found=re.compile("10,000")):
        read(f"{loops}{MAIN} a=$N", "verl")


def test_arrays_grow_and_here_documents_are_no_statements() -> None:
    script = (
        "ARGS=(a=1 b=2)\nARGS=(\"${ARGS[@]}\" e=5)\ncat <<'EOF' > note.txt\nit's x=3\nEOF\nARGS+=(c=3)\n"
        'python3 -m v "${ARGS[@]}" d=4\n'
    )
    assert read(script, "verl") == Written({"a": 1, "b": 2, "e": 5, "c": 3, "d": 4})


def test_the_output_of_a_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/elsewhere")
    found = read("T=$(date +%s)\npython3 -m v a.b=1 seed=$T n=`nproc` out=$(pwd)/x lr=$(python -c 'print(2)')", "verl")
    assert found.values == {"a.b": 1, "out": f"{Path.cwd()}/x"}
    told = "the output of a command is not known; set it by hand"
    assert found.unread == [
        f"seed=$(date +%s): {told}",
        f"n=$(nproc): {told}",
        f"lr=$(python -c 'print(2)'): {told}",
    ]
    found = read("trl grpo --learning_rate $LR --beta 0.1 --seed $(date +%s)", "trl")
    assert found.values == {"beta": 0.1}
    assert found.unread == ["--learning_rate $LR: variable LR is not set in the script", f"--seed $(date +%s): {told}"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.py", b"GRPOConfig(\n", "'(' was never closed"),
        ("a.yaml", b"a: [1\n", "expected ',' or ']', but got '<stream end>'"),
        ("a.sh", b"\xfe\xff\x00", "can't decode byte 0xfe"),
        ("b.sh", b"ARGS=(\n  x=1\n", "a quote or bracket is not closed, in 'ARGS=( x=1"),
        ("c.sh", b"python3 -m v x='abc\n", "a quote or bracket is not closed"),
        ("b.py", b"x = 1\x00", "null bytes"),
    ],
)
def test_a_malformed_file_is_an_error_in_three_parts(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read(str(file), "trl")
    check_fields(raised.value, f"{file}:2:1" if name == "a.yaml" else str(file), found=re.compile(re.escape(told)))
    assert "YAML" in raised.value.expected and raised.value.change


def test_a_long_command_is_no_file_name(tmp_path: Path) -> None:
    value = "x" * 5000
    assert read(f"python3 -m v {'a=' + value}", "verl") == Written({"a": value})
    with raises(ConfigError, value):
        read(value, "verl")


PYTHON = """
import os
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig
LR = 2e-6
SHARED = {"beta": 0.04, "num_generations": 2 * 8}
CHANGED = {"epsilon": 0.1}
CHANGED["epsilon"] = 0.3
args = dict(learning_rate=LR, **SHARED)
def main(seed):
    config = GRPOConfig(**args, **CHANGED, output_dir="out", seed=seed, top_k=os.cpu_count())
    GRPOTrainer(model="m", reward_funcs=[f], args=config, peft_config=LoraConfig(r=8, lora_alpha=64))
"""


def test_constants_of_a_script_are_resolved_and_others_told(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(PYTHON)
    found = read(str(file), "trl")
    assert found.values == {
        "learning_rate": 2e-6,
        "beta": 0.04,
        "num_generations": 16,
        "output_dir": "out",
        "model_name_or_path": "m",
        "reward_funcs": ["f"],
        "use_peft": True,
        "lora_r": 8,
        "lora_alpha": 64,
        "lora_dropout": 0.0,  # of peft; TRL's own flag has 0.05
    }
    hand = "is not a literal: set it by hand"
    assert found.unread == [f"**CHANGED {hand}", f"seed=seed {hand}", f"top_k=os.cpu_count() {hand}"]
    values = convert(found, "trl").values
    assert (values["model.lora.rank"], values["model.lora.alpha"]) == (8, 64)


@pytest.mark.parametrize(
    ("arguments", "values", "unread"),
    [
        ("ref_model=None", {}, []),
        ("NONE", {}, []),
        ("load('r')", {}, ["ref_model=load('r') is not a literal: set it by hand"]),
        ("ref_model='r'", {"ref_model": "r"}, []),
    ],
)
def test_the_reference_of_a_trainer(arguments: str, values: dict[str, str], unread: list[str], tmp_path: Path) -> None:
    file = tmp_path / "dpo.py"
    file.write_text(f"NONE = None\nDPOTrainer('m', {arguments}, args=DPOConfig(beta=0.1))\n")
    found = read(str(file), "trl")
    assert (found.values, found.unread) == ({"model_name_or_path": "m", "beta": 0.1, **values}, unread)


CODE = """'''
python grpo.py --beta 0.1 --loss_type grpo --epsilon 0.3
'''
LEVEL = "sequence"
def main(script_args, training_args):
    training_args.loss_type = "dr_grpo"
    training_args.importance_sampling_level = LEVEL
    training_args.max_steps = len(dataset)
    training_args.epsilon += 0.1
    if script_args.long:
        training_args.max_completion_length = 4096
    training_args.beta, other.temperature = 0.2, 0.3
    model.config.top_k = 5
    GRPOTrainer(model="m", args=training_args)
if __name__ == "__main__":
    script_args, model_args = TrlParser((A, B)).parse_args_and_config()
    model_args.lora_r = 4
    adapter = LoraConfig()
    adapter.target_modules = "all-linear"
"""


def test_values_that_a_script_assigns_to_its_configs_come_after_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "grpo.py"
    file.write_text(CODE.replace("    adapter = LoraConfig()\n", "").replace("    adapter.", "    model_args."))
    found = read(str(file), "trl")
    expected = {"beta": 0.1, "epsilon": 0.3, "loss_type": "dr_grpo", "importance_sampling_level": "sequence"}
    assert found.values == {**expected, "model_name_or_path": "m", "lora_r": 4, "lora_target_modules": "all-linear"}
    assert found.unread == [
        "max_steps=len(dataset) is not a literal: set it by hand",
        "training_args.epsilon += 0.1 is not read: set epsilon by hand",
        "training_args.max_completion_length = 4096 is not read: set max_completion_length by hand",
        "training_args.beta, other.temperature = (0.2, 0.3) is not read: set beta by hand",
    ]
    file.write_text(CODE)
    assert read(str(file), "trl").values["lora_target_modules"] == "all-linear"


def test_maxrl_of_trl_is_max_rl(tmp_path: Path) -> None:
    found = converted("trl_max_rl", tmp_path)
    assert found.values["algorithm.adv_estimator"] == "max_rl"
    assert found.origins["algorithm.adv_estimator"] == "scale_rewards"
    assert not any("scale_rewards" in line or "multi_objective" in line for line in found.check)
    check = convert(Written({"multi_objective_aggregation": "normalize_then_sum"}), "trl").check
    assert any(line.startswith("multi_objective_aggregation=normalize_then_sum: set algorithm.adv") for line in check)


@pytest.mark.parametrize(
    ("flags", "adapter"),
    [("--use_peft", (16, 32)), ("--use_peft --lora_r 8", (8, 32)), ("--lora_r 8 --lora_alpha 4", (None, None))],
)
def test_the_adapter_of_trl(flags: str, adapter: tuple[Any, Any]) -> None:
    values = convert(read(f"trl grpo --beta 0.1 {flags}", "trl"), "trl").values
    assert (values.get("model.lora.rank"), values.get("model.lora.alpha")) == adapter


def test_the_warm_up_and_the_schedule_of_trl() -> None:
    keys = {"max_steps": 45, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine_with_min_lr", "num_processes": 1}
    values = convert(Written({**keys, "lr_scheduler_kwargs": {"min_lr_rate": 0.2}}), "trl").values
    assert values["actor.optim.warmup_steps"] == 5  # 4.5 rounded up, as in transformers
    assert (values["actor.optim.schedule"], values["actor.optim.min_lr_ratio"]) == ("cosine", 0.2)
    found = convert(Written({"warmup_ratio": 0.1, "lr_scheduler_kwargs.min_lr": 1e-7, "num_processes": 1}), "trl")
    assert any(line.startswith("warmup_ratio=0.1: set actor.optim.warmup_steps to this share") for line in found.check)
    assert "lr_scheduler_kwargs.min_lr=1e-07: set actor.optim.min_lr_ratio (divided by `learning_rate`)" in found.check


def of_functions(functions: Any, **keys: Any) -> Converted:
    return convert(Written({"reward_funcs": functions, "num_processes": 1, **keys}), "trl")


def test_the_reward_functions_of_trl() -> None:
    found = of_functions(["accuracy_reward", "think_format_reward"], reward_weights=[1.0, 0.5]).values
    assert found["reward.function"] == ["trl.rewards:accuracy_reward", "trl.rewards:think_format_reward"]
    assert found["reward.weights"] == [1.0, 0.5]
    assert of_functions("my_project.rewards.score").values["reward.function"] == "my_project.rewards:score"
    check = of_functions(["accuracy_reward", "mine"]).check
    [line] = [each for each in check if each.startswith("reward_funcs=accuracy_reward, mine: ")]
    assert "reward.function" in line and " mine as " in line


@pytest.mark.parametrize(
    ("penalty", "limit"),
    [
        ("get_soft_overlong_punishment(max_completion_len=1024, soft_punish_cache=256)", 1024),
        ("get_soft_overlong_punishment", 1280),
    ],
)
def test_the_penalty_for_length_of_trl(penalty: str, limit: int) -> None:
    """The penalty is min(-(len - (limit - 256)) / 256, 0) times its weight in both, with the response length as
    limit."""
    keys = {"reward_weights": [1.0, 0.5], "max_completion_length": limit}
    found = of_functions(["a.b.accuracy", penalty], **keys).values
    assert (found["algorithm.overlong.penalty"], found["algorithm.overlong.buffer_length"]) == (0.5, 256)
    assert (found["reward.function"], found["reward.weights"]) == ("a.b:accuracy", [1.0])
    other = of_functions(["a.b.accuracy", penalty], **keys | {"max_completion_length": limit + 1})
    assert "algorithm.overlong.penalty" not in other.values and "reward.function" not in other.values
    assert any(penalty in line for line in other.check)


def test_every_key_of_the_rewards_of_roll_is_told() -> None:
    worker = "roll.pipeline.rlvr.rewards.{}".format
    rule = worker("ifeval_rule_reward_worker.GeneralRuleRewardWorker")
    keys = {
        "rewards.ifeval.worker_cls": rule,
        "rewards.ifeval.tag_included": ["ifeval"],
        "rewards.ifeval.reward_type": "soft",
        "rewards.math.worker_cls": worker("math_rule_reward_worker.MathRuleRewardWorker"),
        "rewards.math.model_args.model_name_or_path": "m",
        "rewards.other.worker_cls": "mine.Worker",
    }
    found = convert(Written(keys), "roll")
    assert found.values["reward.domains.ifeval.function"] == "ifeval"
    assert found.values["reward.domains.ifeval.sources"] == ["ifeval"]
    assert found.values["reward.domains.math.function"] == "math"
    assert any(
        line.startswith(f"rewards.ifeval.worker_cls={rule}: rows there name `func_name`") for line in found.check
    )
    assert "rewards.other.worker_cls=mine.Worker: set reward.domains.other.function" in found.check
    assert found.without == ["rewards.ifeval.reward_type=soft"]
    assert "rewards.math.model_args.model_name_or_path" in found.speed  # a rule has no model
