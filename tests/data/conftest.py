# SPDX-License-Identifier: Apache-2.0
import copy
from collections.abc import Callable

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.data.seeing import seeing


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Byte-level BPE of 512 tokens with a ChatML template that only appends."""
    from whet.plugins.lessons.init_model import init_model

    return AutoTokenizer.from_pretrained(init_model(tmp_path_factory.mktemp("tiny") / "model", "qwen3", "nano"))


@pytest.fixture
def with_template(tokenizer: PreTrainedTokenizerBase) -> Callable[[str | None], PreTrainedTokenizerBase]:
    """The same tokenizer with another chat template, or with none."""

    def make(template: str | None) -> PreTrainedTokenizerBase:
        changed = copy.deepcopy(tokenizer)
        changed.chat_template = template
        return changed

    return make


@pytest.fixture
def sighted(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokenizer with image and video tokens and a vision of a token per 28 x 28 pixels."""
    return seeing(copy.deepcopy(tokenizer))
