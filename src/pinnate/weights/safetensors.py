"""Reader of safetensors checkpoints, single or sharded, by the format's specification (huggingface/safetensors).

Knows: the file format, the index of shards, and that neither may be believed before it is checked. Must not know: what
the tensors mean to a model. Free of NumPy. Files are mapped; tensors are views that keep their map alive. Pickle
formats are never opened.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec

from pinnate.core.errors import ModelError
from pinnate.graph import BLOCK_SIZES, Tensor, TensorType

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library
_TYPES = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}
_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in a header; `data_offsets` count from the end of the header."""

    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _Shard:
    """One mapped file with a checked header.

    Raises ModelError where the file is absent, cut, or a header entry does not lie in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = _map(path)
        size = len(self._buffer)
        length = struct.unpack_from("<Q", self._buffer)[0] if size >= 8 else size
        if length > min(_MAX_HEADER, size - 8):
            raise ModelError(f"{path}: truncated or corrupt: a header of {length} bytes in a file of {size} bytes")
        self._start = 8 + length
        self._data_bytes = size - self._start
        self.entries = self._read_header(self._buffer[8 : self._start])

    def tensor(self, name: str) -> Tensor:
        """Raises ModelError where the storage type is not supported."""
        entry = self.entries[name]
        type_ = _TYPES.get(entry.dtype)
        if type_ is None:
            raise self._fail(name, f"has the unsupported type {entry.dtype}; supported: {', '.join(_TYPES)}")
        begin, end = entry.data_offsets
        if end - begin != prod(entry.shape) * BLOCK_SIZES[type_][1]:
            raise self._fail(name, f"has {end - begin} bytes, which is not {entry.dtype} of shape {entry.shape}")
        data = memoryview(self._buffer)[self._start + begin : self._start + end]
        return Tensor(name, tuple(entry.shape), type_, data)

    def _read_header(self, header: bytes) -> dict[str, _Entry]:
        try:
            raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            entries = {k: msgspec.json.decode(v, type=_Entry) for k, v in raw.items() if k != "__metadata__"}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ModelError(f"{self.path}: the header is malformed: {error}") from None
        for name, entry in entries.items():
            begin, end = entry.data_offsets
            if begin > end:
                raise self._fail(name, f"has the impossible data offsets [{begin}, {end}]")
            if end > self._data_bytes:
                raise self._fail(
                    name, f"ends at data byte {end}, the file has {self._data_bytes}: truncated or corrupt"
                )
        return entries

    def _fail(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: tensor {printable(name)} {problem}")


class SafetensorsFolder:
    """The weights of a model folder: what `model.safetensors.index.json` lists, else all of `model.safetensors`.

    Where there is an index, a `model.safetensors` beside it and tensors that the index does not place in their shard
    are not used (`unindexed` names the latter).

    Raises:
        ModelError: a file or an indexed tensor is missing or damaged, or there are only pickle files.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        index = self.path / INDEX
        if index.is_file():
            places = _read_index(index)
        elif (self.path / SINGLE).is_file():
            places = None
        else:
            raise _no_weights(self.path)
        files = sorted(set(places.values())) if places is not None else [SINGLE]
        self._shards = {file: _Shard(self.path / file) for file in files}
        held = {(name, file) for file, shard in self._shards.items() for name in shard.entries}
        self._places = places if places is not None else dict(held)
        for name, file in self._places.items():
            if (name, file) not in held:
                raise ModelError(
                    f"{self.path / file}: tensor {printable(name)} is missing; {INDEX} places it in this file"
                )
        self.unindexed = sorted(f"{name} ({file})" for name, file in held if self._places.get(name) != file)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def tensor(self, name: str) -> Tensor:
        return self._shards[self._places[name]].tensor(name)

    def origin(self, name: str) -> str:
        """File and tensor, for errors; the folder where no file has it."""
        file = self._places.get(name, "" if len(self._shards) > 1 else next(iter(self._shards)))
        return f"{self.path / file}: tensor {name}"


def printable(text: str) -> str:
    """A name from a file, fit for a one-line message."""
    return "".join(c if c.isprintable() else "?" for c in text[:200])


def _read_index(path: Path) -> dict[str, str]:
    try:
        places = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: malformed: {error}") from None
    if not places:
        raise ModelError(f"{path}: malformed: it lists no tensors")
    for name, file in places.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{path}: tensor {printable(name)} lies in {printable(file)!r}, no safetensors file of this folder"
            )
    return places


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: the file is missing") from None
    except ValueError:
        raise ModelError(f"{path}: the file is empty") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if pickles:
        return ModelError(f"{folder}: {pickles[0]} is a pickle file, which is never read; convert it to {SINGLE}")
    return ModelError(f"{folder}: there is no {SINGLE} and no {INDEX}")
