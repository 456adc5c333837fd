# SPDX-License-Identifier: Apache-2.0
"""Audio of rows: the size of a WAV file from its header, which nothing decodes here."""

from __future__ import annotations

import wave
from typing import IO

from whet.data.pixels import REPLACE, Header
from whet.errors import DataError


def audio_header(file: IO[bytes]) -> Header:
    """Reads channels (as the height), samples (as the width) and the length in seconds.  Raises: DataError."""
    try:
        with wave.open(file) as sound:
            samples, rate = sound.getnframes(), sound.getframerate()
            return Header(sound.getnchannels(), samples, ".wav", (samples / rate,))
    except (wave.Error, EOFError, ZeroDivisionError) as error:
        raise DataError("format", f"no WAV file ({error})", "a WAV file of plain samples", REPLACE) from error
