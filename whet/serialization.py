# SPDX-License-Identifier: Apache-2.0
"""Serializes objects with tensors: by pickle without copying tensors, and to files that load without running code.

A file can have any nesting of None, bool, int, float, str, bytes, list, tuple, dict, tensors, arrays (of numbers or of
such objects) and the types of `whet.types`. Subclasses of plain types and numpy numbers are loaded as the plain type.
The format is safetensors: all tensors, and under "json" the objects, which refer to tensors by name.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch

from whet import files
from whet.errors import DataError
from whet.types import Failure, Group, Media, MediaTokens, Message, Prompt, Trajectory, Turn

# Errors of reading a file with false content.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_VERSION = 1
_TYPES = {cls.__name__: cls for cls in (Media, MediaTokens, Message, Prompt, Turn, Failure, Trajectory, Group)}
_TAG = "$type"


def dumps(value: object) -> tuple[memoryview, list[pickle.PickleBuffer]]:
    """Returns the pickle of `value`, and the bytes of its tensors as views of their memory.

    `pickle.loads` restores the tensors on the CPU, without gradients, on the memory of the buffers (if that is
    read-only, writing into such a tensor is undefined). The pickle has only the elements of a view, not its whole
    storage, and has an object with several references once.  Raises: pickle's errors."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return stream.getbuffer(), buffers


class OutOfBand:
    """Wraps a value for any pickle: bytes of its tensors become protocol 5 buffers; loading returns the value."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        stream, buffers = dumps(self._value)
        has_buffers = protocol.__index__() >= 5
        return _loads, (bytes(stream), buffers if has_buffers else [bytearray(buffer.raw()) for buffer in buffers])


def save(path: str | os.PathLike[str], value: object) -> None:
    """Writes `value` to a file atomically.

    Raises: DataError, with the position in `value`, for an object of an unsupported type.
    """
    path, encoder = Path(path), _Encoder()
    document = {"version": _VERSION, "value": encoder.encode(value, "")}
    tensors = {**_apart(encoder.tensors), "json": _bytes_as_tensor(json.dumps(document).encode())}
    with files.replacing(path, synced=True) as partial:
        mode = partial.stat().st_mode  # by the user's umask; safetensors would make the file private
        try:
            safetensors.torch.save_file(tensors, partial)  # without a copy of the tensors
        except KeyError as missing:  # a dtype that safetensors does not know
            name = next(name for name, tensor in tensors.items() if tensor.dtype in missing.args).partition(":")[2]
            found, expected = f"a tensor of {missing.args[0]}", "a dtype that a file can store"
            raise DataError(name, found, expected, "convert it") from None
        partial.chmod(mode)


def load(path: str | os.PathLike[str]) -> Any:
    """Reads a file of `save`, with tensors on the CPU.  Raises: FileNotFoundError; DataError for a damaged file."""
    try:
        with Path(path).open("rb") as file:  # safetensors opens a name twice; the file may be replaced in between
            tensors = safetensors.torch.load_file(f"/dev/fd/{file.fileno()}")
        document = json.loads(tensors["json"].numpy().tobytes())
        version = document["version"]
        if version == _VERSION:
            return _decode(document["value"], tensors)
    except (safetensors.SafetensorError, *MALFORMED) as error:
        found = f"damaged, or not written by whet: {error!r}"
        raise DataError(str(path), found, change="write it again, or name another file") from error
    raise DataError(f"{path}: file version", version, str(_VERSION), "read it with another whet")


def fits(saved: object, own: object) -> bool:
    """Tells whether a saved value has the same kind as the run's `own` value, so that a wrong state fails before
    anything is restored. Numbers match numbers, texts match texts, also in dicts and lists; an own None matches all."""
    match own:
        case None:
            return True
        case Mapping():
            return isinstance(saved, Mapping) and all(fits(saved[x], own[x]) for x in own.keys() & saved.keys())
        case list() | tuple():
            return isinstance(saved, list | tuple) and all(map(fits, saved, own))
        case int() | float():
            return isinstance(saved, int | float)
    return isinstance(saved, type(own))


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moves tensors to the host, and copies tensors that share storage, which safetensors does not allow."""
    hosted = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    owners = Counter(tensor.untyped_storage().data_ptr() for tensor in hosted.values())

    def own(tensor: torch.Tensor) -> torch.Tensor:
        is_shared = owners[tensor.untyped_storage().data_ptr()] > 1
        return tensor.clone(memory_format=torch.contiguous_format) if is_shared else tensor.contiguous()

    return {name: own(tensor) for name, tensor in hosted.items()}


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented  # the object's own pickling
        return _tensor_on, (pickle.PickleBuffer(_octets(value).data), value.dtype, tuple(value.shape))


def _octets(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Returns the bytes of a tensor: a view of its memory if it is contiguous and on the host."""
    tensor = tensor.detach().cpu().contiguous()
    # A tensor of one element is contiguous with any stride, and only stride 1 can be viewed as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


Packed = tuple[str, tuple[int, ...], Any]  # dtype, shape, bytes


def pack_tensor(tensor: torch.Tensor) -> Packed:
    """Returns the name of the dtype, the shape, and the bytes of a tensor as a view of its memory."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _octets(tensor)


def unpack_tensor(packed: Packed) -> torch.Tensor:
    """Returns the tensor that `pack_tensor` packed, on the CPU and in its own memory."""
    dtype, shape, octets = packed
    return _tensor_on(bytearray(octets), getattr(torch, dtype), shape)


def _loads(stream: bytes, buffers: Sequence[Any]) -> Any:
    return pickle.loads(stream, buffers=buffers)


def _tensor_on(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Makes a tensor on the memory of `buffer`."""
    if 0 in shape:  # torch refuses an empty buffer
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():  # Ray's memory is read-only; see `dumps`
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


class _Encoder:
    """Converts objects to JSON values, and collects their tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    def encode(self, value: object, where: str) -> Any:
        """Converts `value` to JSON; `where` is its position in the whole, such as `objects.uid[3]`."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list():
                return self._items(value, where)
            case dict() if _TAG not in value and all(isinstance(key, str) for key in value):
                return {key: self.encode(item, f"{where}.{key}") for key, item in value.items()}
            case np.generic() if value.dtype.kind in "biuf":
                return self.encode(value.item(), where)
        return self._tagged(value, where)

    def _tagged(self, value: object, where: str) -> dict[str, object]:
        match value:
            case tuple():
                return {_TAG: "tuple", "items": self._items(value, where)}
            case dict():
                return {_TAG: "dict", "items": [self._items(pair, f"{where}.{pair[0]}") for pair in value.items()]}
            case torch.Tensor():
                return {_TAG: "tensor", "name": self._name(value, value, where)}
            case bytes():
                return {_TAG: "bytes", "name": self._name(value, _bytes_as_tensor(value), where)}
            case np.ndarray() if value.dtype == object:
                return {_TAG: "objects", "shape": value.shape, "items": self._items(value.flat, where)}
            case np.ndarray() if value.dtype.kind in "biuf":
                return {_TAG: "array", "name": self._name(value, torch.from_numpy(value.copy()), where)}
            case _ if type(value) in _TYPES.values():
                return {_TAG: type(value).__name__, "fields": self.encode(dict(vars(value)), where)}
        found, expected = f"a {type(value).__module__}.{type(value).__qualname__}", "a value that a file can store"
        change = "convert it to plain objects (str, numbers, list, dict, ...), tensors and arrays, or remove it"
        raise DataError(where.lstrip("."), found, expected, change)

    def _items(self, values: Iterable[object], where: str) -> list[object]:
        return [self.encode(item, f"{where}[{number}]") for number, item in enumerate(values)]

    def _name(self, value: object, tensor: torch.Tensor, where: str) -> str:
        """Returns the name under which `tensor`, the content of `value`, is stored; one name for each `value`."""
        name = self._names.setdefault(id(value), f"{len(self._names)}:{where.lstrip('.')}")
        self.tensors.setdefault(name, tensor)
        return name


def _bytes_as_tensor(octets: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(octets, dtype=np.uint8).copy())


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case list():
            return [_decode(item, tensors) for item in value]
        case {"$type": "tuple", "items": items}:
            return tuple(_decode(items, tensors))
        case {"$type": "dict", "items": items}:
            return dict(_decode(items, tensors))
        case {"$type": "tensor", "name": name}:
            return tensors[name]
        case {"$type": "bytes", "name": name}:
            return tensors[name].numpy().tobytes()
        case {"$type": "array", "name": name}:
            return tensors[name].numpy()
        case {"$type": "objects", "items": items, "shape": shape}:
            array = np.empty(len(items), dtype=object)
            for number, item in enumerate(items):
                array[number] = _decode(item, tensors)
            return array.reshape(shape)
        case {"$type": name}:
            return _TYPES[name](**_decode(value["fields"], tensors))
        case dict():
            return {key: _decode(item, tensors) for key, item in value.items()}
    return value
