"""Reader of GGUF files (versions 2 and 3, little-endian), by the format's specification (ggml, docs/gguf.md).

Knows: the file format, and that nothing in a file may be believed before it is checked against the file's size.
Must not know: what the keys and tensors mean to a model. Free of NumPy: the HTTP process reads metadata with it.

The file is mapped. Tensors are views of the map and keep it alive; metadata values are decoded on access.
"""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from pinnate.core.errors import ModelError
from pinnate.graph import BLOCK_SIZES, Tensor, TensorType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_NAME = 65535  # bytes of a key or tensor name
_MAX_MESSAGE = 500
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
# value type of the format -> format character of struct and array; bool is one byte
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q")

# Storage types that the format has and this engine does not (for the error message).
_UNSUPPORTED_TYPES = {
    7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


class _Cursor:
    """A position in the mapped file. Every read is checked against the end of the file first.

    Raises ModelError that names the file and `what` was being read.
    """

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.pos = 0

    def fail(self, problem: str) -> ModelError:
        """Names in a damaged file can be anything: the message stays one line of bounded length."""
        printable = "".join(c if c.isprintable() else "?" for c in problem[:_MAX_MESSAGE])
        return ModelError(f"{self.path}: {printable}")

    def past_end(self, what: str, start: int) -> ModelError:
        return self.fail(f"truncated or corrupt: {what} at byte {start} runs past the end ({self.size} bytes)")

    def advance(self, num_bytes: int, what: str) -> int:
        """Moves past `num_bytes` and returns where they start."""
        start = self.pos
        if num_bytes > self.size - start:
            raise self.past_end(what, start)
        self.pos = start + num_bytes
        return start

    def scalar(self, code: str, what: str) -> int | float:
        start = self.advance(struct.calcsize("<" + code), what)
        value: int | float = struct.unpack_from("<" + code, self.buffer, start)[0]
        return value

    def uint(self, code: str, what: str) -> int:
        return int(self.scalar(code, what))

    def string(self, what: str, limit: int = sys.maxsize) -> str:
        length = self.uint("Q", what)
        if length > limit:
            raise self.fail(f"corrupt: {what} of {length} bytes")
        start = self.advance(length, what)
        try:
            return str(self.buffer[start : self.pos], "utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8") from None

    def skip_strings(self, count: int, what: str) -> None:
        """Moves past `count` strings. A plain loop over local names: vocabularies have 100k of them."""
        pos, size, buffer, unpack = self.pos, self.size, self.buffer, _U64.unpack_from
        for _ in range(count):
            if pos + 8 > size:
                break
            pos += 8 + unpack(buffer, pos)[0]
        else:
            if pos <= size:
                self.pos = pos
                return
        raise self.past_end(f"a string of {what}", self.pos)

    def count(self, least_bytes: int, what: str) -> int:
        """A 64-bit count of things of at least `least_bytes` each: no more than the rest of the file can hold."""
        count = self.uint("Q", what)
        if count > (self.size - self.pos) // least_bytes:
            raise self.fail(f"truncated or corrupt: {what} is {count}, more than the file can hold ({self.size} bytes)")
        return count


class GGUFMetadata(Mapping[str, object]):
    """The key-value section. Scalars are int, float, bool or str; arrays are lists, decoded when first asked for."""

    def __init__(self, cursor: _Cursor, count: int) -> None:
        self._cursor = cursor
        self._offsets: dict[str, tuple[int, int]] = {}  # key -> value type, where the value starts
        self._values: dict[str, object] = {}
        for _ in range(count):
            key = cursor.string("a metadata key", _MAX_NAME)
            if key in self._offsets:
                raise cursor.fail(f"metadata key {key!r} is there twice")
            value_type = cursor.uint("I", f"the type of {key}")
            self._offsets[key] = (value_type, cursor.pos)
            self._skip(value_type, key)

    def __getitem__(self, key: str) -> object:
        if key not in self._values:
            value_type, self._cursor.pos = self._offsets[key]
            self._values[key] = self._decode(value_type, key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    def count(self, key: str) -> int:
        """How many elements the array `key` has, without decoding it; 0 where it is absent or no array."""
        value_type, start = self._offsets.get(key, (0, 0))
        if value_type != _ARRAY:
            return 0
        return int(_U64.unpack_from(self._cursor.buffer, start + 4)[0])

    def _skip(self, value_type: int, key: str) -> None:
        cursor = self._cursor
        if value_type == _STRING:
            cursor.skip_strings(1, key)
        elif value_type == _ARRAY:
            element, count = self._array_head(key)
            if element == _STRING:
                cursor.skip_strings(count, key)
            else:
                cursor.advance(count * struct.calcsize("<" + _SCALARS[element]), key)
        elif value_type in _SCALARS:
            cursor.advance(struct.calcsize("<" + _SCALARS[value_type]), key)
        else:
            raise cursor.fail(f"metadata key {key!r} has the unknown value type {value_type}")

    def _array_head(self, key: str) -> tuple[int, int]:
        element = self._cursor.uint("I", key)
        if element != _STRING and element not in _SCALARS:
            raise self._cursor.fail(f"metadata key {key!r} is an array of the unsupported value type {element}")
        least_bytes = 8 if element == _STRING else struct.calcsize("<" + _SCALARS[element])
        return element, self._cursor.count(least_bytes, f"the length of {key}")

    def _decode(self, value_type: int, key: str) -> object:
        cursor = self._cursor
        if value_type == _STRING:
            return cursor.string(key)
        if value_type == _BOOL:
            return cursor.scalar("B", key) != 0
        if value_type != _ARRAY:
            return cursor.scalar(_SCALARS[value_type], key)
        element, count = self._array_head(key)
        if element == _STRING:
            return self._decode_strings(count, key)
        values = array(_SCALARS[element])
        start = cursor.advance(count * struct.calcsize("<" + _SCALARS[element]), key)
        values.frombytes(cursor.buffer[start : cursor.pos])
        if sys.byteorder == "big":
            values.byteswap()
        return [bool(v) for v in values] if element == _BOOL else values.tolist()

    def _decode_strings(self, count: int, key: str) -> list[str]:
        # Lengths were checked when the section was skipped over.
        pos, buffer, unpack = self._cursor.pos, self._cursor.buffer, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(buffer, pos)[0]
                strings.append(str(buffer[start:pos], "utf-8"))
        except UnicodeDecodeError:
            raise self._cursor.fail(f"entry {len(strings)} of {key} is not valid UTF-8") from None
        return strings


class GGUFFile:
    """One GGUF file, mapped and checked: `metadata`, and `tensors` under the file's own names.

    Shapes are row-major ([out, in] for matrices; the file stores them the other way round).

    Raises:
        ModelError: the file cannot be opened, is no GGUF, is damaged, or holds a tensor type that is not supported.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        cursor = _Cursor(self.path, _map(self.path))
        if cursor.buffer[:4] != _MAGIC:
            raise cursor.fail(f"not a GGUF file (it starts with {cursor.buffer[:4]!r}, not {_MAGIC!r})")
        cursor.pos = 4
        self.version = cursor.uint("I", "the version")
        if self.version not in _VERSIONS:
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            hint = " (a big-endian file)" if swapped in _VERSIONS else ""
            raise cursor.fail(f"GGUF version {self.version}{hint} is not supported; supported: 2, 3 (little-endian)")
        num_tensors = cursor.count(24, "the tensor count")
        num_keys = cursor.count(13, "the metadata count")
        self.metadata = GGUFMetadata(cursor, num_keys)
        self.tensors = _read_tensors(cursor, num_tensors, _alignment(cursor, self.metadata))


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path}: the file is empty") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None


def _alignment(cursor: _Cursor, metadata: GGUFMetadata) -> int:
    after_metadata = cursor.pos
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    cursor.pos = after_metadata
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
        raise cursor.fail(f"general.alignment must be a power of two, got {value!r}")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, Tensor]:
    infos = [_read_tensor_info(cursor) for _ in range(count)]
    data_start = -(-cursor.pos // alignment) * alignment
    file_view = memoryview(cursor.buffer)
    tensors: dict[str, Tensor] = {}
    for name, shape, type_, offset in infos:
        if name in tensors:
            raise cursor.fail(f"tensor {name} is there twice")
        elements, block_bytes = BLOCK_SIZES[type_]
        num_bytes = prod(shape) // elements * block_bytes
        start = data_start + offset
        if offset % alignment:
            raise cursor.fail(f"tensor {name} starts at {offset}, which is no multiple of the alignment {alignment}")
        if start + num_bytes > cursor.size:
            raise cursor.past_end(f"tensor {name} of {num_bytes} bytes", start)
        tensors[name] = Tensor(name, shape, type_, file_view[start : start + num_bytes])
    return tensors


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], TensorType, int]:
    name = cursor.string("a tensor name", _MAX_NAME)
    num_dims = cursor.uint("I", f"tensor {name}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
    dims = [cursor.uint("Q", f"tensor {name}") for _ in range(num_dims)]
    type_number = cursor.uint("I", f"tensor {name}")
    offset = cursor.uint("Q", f"tensor {name}")
    try:
        type_ = TensorType(type_number)
    except ValueError:
        shown = _UNSUPPORTED_TYPES.get(type_number, f"number {type_number}")
        supported = ", ".join(t.name for t in TensorType)
        raise cursor.fail(f"tensor {name} has the unsupported type {shown}; supported: {supported}") from None
    if min(dims) < 1:
        raise cursor.fail(f"tensor {name} has an empty dimension: {dims}")
    if dims[0] % BLOCK_SIZES[type_][0]:
        raise cursor.fail(f"tensor {name}: rows of {dims[0]} elements are no whole number of {type_.name} blocks")
    return name, tuple(reversed(dims)), type_, offset
