# SPDX-License-Identifier: Apache-2.0
"""Finds the registered encoders for a type of model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from whet.errors import ModelError
from whet.models.encoders.base import Encoders, body_of
from whet.registry import ENCODERS

# transformers' types of models that read media and cannot be loaded as a causal language model.
UNREAD = {*auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
UNREAD -= auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


def names_of(model_type: str) -> list[str]:
    """Lists the names of the registered encoders for a type of model."""
    return [name for name in ENCODERS.names() if name.rpartition("/")[0] == model_type]


def load_encoders(path: str | Path, config: Any, *, trust_remote_code: bool = False) -> Encoders | None:
    """Loads the encoders of the model at `path`, with this transformers config; None for a text model.

    Needs no weights.  Raises: ModelError if files of its processors are missing or do not fit the model, and for a
    vision model that has no registered encoder and cannot run as a language model without its tower."""
    families: dict[str, Any] = {each.rpartition("/")[2]: ENCODERS[each].load() for each in names_of(config.model_type)}
    if not families and config.model_type in UNREAD:
        expected = f"one of {', '.join(sorted({each.rpartition('/')[0] for each in ENCODERS.names()}))}"
        change = "choose one of these, or register an encoder (docs/adding-a-model.md)"
        raise ModelError(f"{path}", f"is {config.model_type}, a model with media that has no encoder", expected, change)
    made = {each: each.load(path, config, trust_remote_code=trust_remote_code) for each in {*families.values()}}
    return Encoders({kind: made[each] for kind, each in families.items()}) if made else None


def attach(thing: Any, encoders: Encoders | None) -> None:
    """Attaches `encoders` to a tokenizer or to the body of a model, so that `encoders_of` finds them."""
    (body_of(thing) if isinstance(thing, nn.Module) else thing).encoders = encoders


def encoders_of(thing: Any) -> Encoders | None:
    """Returns the encoders of a model from `load_policy`, or of a tokenizer from `load_tokenizer`; None without any."""
    if isinstance(thing, nn.Module):
        thing = thing.base_model if isinstance(thing, PreTrainedModel) else getattr(thing, "body", None)
    found = getattr(thing, "encoders", None)
    return found if isinstance(found, Encoders) else None
