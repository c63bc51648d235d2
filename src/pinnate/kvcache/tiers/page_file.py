"""One KV page as a file: a header that says what it is, the page's tokens, a checksum, the bytes.

Knows: the format, and what may be wrong with a file. Must not know: where files lie.

    magic 8 | namespace 16 | key 16 | parent 16 | number of tokens u32 | number of bytes u64 | crc32 u32 | adler32 u32
    tokens  i32 each
    the page's bytes
Integers are little-endian. The two sums cover everything else. They are independent, and take half the time of a
cryptographic hash, of which there is no need: who can write into the folder can write whatever they like.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array

from pinnate.kvcache.tiers.tier import PageName

MAGIC = b"PNKVPG01"
_HEAD = struct.Struct("<8s16s16s16sIQ")
_SUMS = struct.Struct("<II")

Data = bytes | bytearray | memoryview


def header_bytes(page_size: int) -> int:
    return _HEAD.size + _SUMS.size + 4 * page_size


def make_header(namespace: bytes, name: PageName, data: Data) -> bytes:
    """What comes before `data` in the file."""
    head = _head(namespace, name, len(data))
    tokens = _tokens(name.tokens)
    return head + _sums(head, tokens, data) + tokens


def problem_of(file: memoryview, namespace: bytes, name: PageName, num_bytes: int) -> str | None:
    """Why the content of a file is not that page of `num_bytes`; None: it is."""
    expected = header_bytes(len(name.tokens)) + num_bytes
    if len(file) != expected:
        return f"it has {len(file)} bytes instead of {expected}"
    head, tokens = _head(namespace, name, num_bytes), _tokens(name.tokens)
    if file[: len(MAGIC)] != MAGIC:
        return "it is no page of KV memory"
    start = _HEAD.size + _SUMS.size
    if file[: _HEAD.size] != head or file[start : start + len(tokens)] != tokens:
        return "it is another page, or one of another model"
    if file[_HEAD.size : start] != _sums(head, tokens, file[start + len(tokens) :]):
        return "its checksum is wrong"
    return None


def _head(namespace: bytes, name: PageName, num_bytes: int) -> bytes:
    return _HEAD.pack(MAGIC, namespace, name.key, name.parent, len(name.tokens), num_bytes)


def _tokens(tokens: array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def _sums(head: bytes, tokens: bytes, data: Data) -> bytes:
    crc, adler = 0, 1
    for part in (head, tokens, data):
        crc, adler = zlib.crc32(part, crc), zlib.adler32(part, adler)
    return _SUMS.pack(crc, adler)
