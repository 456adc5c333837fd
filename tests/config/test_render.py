# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import yaml

from whet.config import TrainConfig, keyed_lines, to_yaml


def config() -> TrainConfig:
    values = {
        "data": {"format_prompt": 'two\nlines: "x"', "train_files": ["a.jsonl", "b: c"]},
        "extra": {"mine": {"deep": 1.5}},
    }
    return TrainConfig.model_validate(values)


def test_the_lines_are_yaml_of_the_whole_config_one_line_a_value() -> None:
    lines = keyed_lines(config())
    assert yaml.safe_load("\n".join(line for line, _ in lines)) == yaml.safe_load(to_yaml(config()))
    assert all("\n" not in line for line, _ in lines)


def test_each_line_with_a_value_has_its_dotted_key() -> None:
    by_key = {key: line for line, key in keyed_lines(config()) if key}
    assert by_key["data.train_files"] == "  train_files: [a.jsonl, 'b: c']"
    assert by_key["extra.mine.deep"] == "    deep: 1.5"
    assert by_key["algorithm.adv_options"] == "  adv_options: {}"
    assert by_key["actor.optim.lr"] == "    lr: 1.0e-06"
    assert ("    validation:", "") not in keyed_lines(config()) and ("  validation:", "") in keyed_lines(config())
