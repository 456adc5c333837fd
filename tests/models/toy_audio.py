# SPDX-License-Identifier: Apache-2.0
"""A model that reads audio, in one file: a nano causal language model, a linear layer over frames, and its encoder."""

from __future__ import annotations

import io
import math
import struct
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from whet import register_encoder
from whet.data.pixels import opened
from whet.models.encoders.base import Encoder, EncoderOutput, Features, Hidden, PixelLimits, Prepared, Size
from whet.plugins.lessons.init_model import init_model
from whet.types import Media, MediaTokens

FRAME = 40  # samples of a token
RATE = 400  # samples a second
PAD, TEXT = "<|audio_pad|>", "{{ message.content }}"


class ToyAudioConfig(Qwen3Config):
    """Qwen 3 with the id of the audio token."""

    model_type = "toy_audio"
    audio_token_id: int = 0


class ToyAudioModel(Qwen3Model):
    """Puts the features of frames in the place of audio tokens."""

    config_class = ToyAudioConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.audio_tower = nn.Linear(FRAME, config.hidden_size)
        self.post_init()

    def forward(self, input_ids: Any = None, mm_encoder_outputs: Any = None, **kwargs: Any) -> Any:
        given = kwargs.pop("inputs_embeds", None)
        embeds = self.embed_tokens(input_ids) if given is None else given
        if mm_encoder_outputs:
            is_audio = (input_ids == self.config.audio_token_id)[..., None]
            embeds = embeds.masked_scatter(is_audio, mm_encoder_outputs["audio"].pooler_output.to(embeds.dtype))
        return super().forward(inputs_embeds=embeds, **kwargs)


class ToyAudioForCausalLM(Qwen3ForCausalLM):
    """With its head."""

    config_class = ToyAudioConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = ToyAudioModel(config)
        self.post_init()


@register_encoder("toy_audio/audio")
class ToyAudio(Encoder):
    """A token for each frame, on one axis of positions."""

    towers = ("audio_tower",)
    auto_class = AutoModelForCausalLM
    identity = "toy audio"
    patches_per_token = 1.0

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def forbidden(self) -> tuple[int, ...]:
        return (self.config.audio_token_id,)

    @classmethod
    def load(cls, path: str | Path, config: Any, *, trust_remote_code: bool = False) -> Self:
        return cls(config)

    def measure(self, kind: str, size: Size, seconds: Sequence[float], limits: PixelLimits) -> MediaTokens:
        channels, samples = size
        if channels != 1:
            raise ValueError("one channel")
        frames = -(-samples // FRAME)
        return MediaTokens(PAD, ((PAD, frames),), self.config.audio_token_id, ((frames, 1, 1),), size)

    def prepare(self, media: Media) -> Prepared:
        with opened(media.source) as file, wave.open(file) as sound:
            samples = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
        samples = np.pad(samples, (0, -len(samples) % FRAME))
        return {"frames": torch.from_numpy(samples.reshape(-1, FRAME) / 2.0**15).float()}

    def embed(self, body: Any, prepared: Sequence[Prepared]) -> list[Hidden]:
        lengths = [len(each["frames"]) for each in prepared]
        hidden = body.audio_tower(torch.cat([each["frames"] for each in prepared]))
        return [(each, ()) for each in hidden.split(lengths)]

    def output(self, features: Sequence[Features]) -> EncoderOutput:
        return EncoderOutput(torch.cat([each.hidden for each in features]))

    def smallest(self) -> Prepared:
        return {"frames": torch.zeros(1, FRAME)}

    def save(self, folder: Path) -> None:
        """Nothing: the encoder has no files."""


AutoConfig.register("toy_audio", ToyAudioConfig)
AutoModelForCausalLM.register(ToyAudioConfig, ToyAudioForCausalLM)


def folder_of(path: Path) -> Path:
    """A model with random weights, and a tokenizer with the audio token."""
    base = init_model(path.with_name("base"), "qwen3", "nano", num_layers=2)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": [PAD]})
    part = f"{{% if part.type == 'audio' %}}{PAD}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    content = f"{{% if message.content is string %}}{TEXT}{{% else %}}{{% for part in message.content %}}{part}"
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        f"{content}{{% endfor %}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    values = AutoConfig.from_pretrained(base).to_dict() | {"audio_token_id": tokenizer.convert_tokens_to_ids(PAD)}
    del values["model_type"], values["architectures"]
    torch.manual_seed(0)
    model = ToyAudioForCausalLM(ToyAudioConfig(**values | {"vocab_size": 16 * -(-len(tokenizer) // 16)}))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def tone(frequency: float, frames: int) -> bytes:
    """A WAV file with a sine."""
    numbers = [int(2**14 * math.sin(2 * math.pi * frequency * at / RATE)) for at in range(frames * FRAME)]
    with io.BytesIO() as file:
        with wave.open(file, "wb") as sound:
            sound.setparams((1, 2, RATE, len(numbers), "NONE", ""))
            sound.writeframes(struct.pack(f"<{len(numbers)}h", *numbers))
        return file.getvalue()
