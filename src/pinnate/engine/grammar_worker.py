"""The checking process: `python -m pinnate.engine.grammar_worker`. Started by GrammarChecker, never by hand; killed
when a compile takes too long.

Knows: its stdin (a WorkerStart, then StructuredOutputs), its stdout (a Verdict for each). Must not know: models,
requests. Frames are msgpack behind their length. It ends when its stdin does, also in the middle of a compile."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from typing import BinaryIO

import msgspec

from pinnate.core.structured import StructuredOutput

LENGTH_BYTES = 4
NICENESS = (
    5  # behind the engine's threads; while the process loads it is not, for then somebody waits for half a second
)


class WorkerStart(msgspec.Struct, frozen=True):
    """The vocabulary, and the limit of this process's memory in bytes of address space (0: none)."""

    tokens: list[bytes]
    special: list[int]
    eos: list[int]
    most_bytes: int


class Verdict(msgspec.Struct, frozen=True):
    """`checked` is the form that the engine takes; None where there is a fault (text/grammars/faults.py)."""

    checked: StructuredOutput | None
    message: str = ""
    path: str = ""
    unsupported: bool = False


def frame(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def main() -> int:
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_frames, args=(sys.stdin.buffer, jobs), daemon=True).start()
    start = msgspec.msgpack.decode(jobs.get(), type=WorkerStart)
    from pinnate.text.grammars.backend import LLGuidanceBackend, VocabularyBytes
    from pinnate.text.grammars.check import check
    from pinnate.text.grammars.faults import Fault

    backend = LLGuidanceBackend(VocabularyBytes(start.tokens, start.special, start.eos))
    _limit(start.most_bytes)
    _hush()
    decoder = msgspec.msgpack.Decoder(StructuredOutput)
    _answer(Verdict(None))  # ready
    while True:
        try:
            verdict = Verdict(check(decoder.decode(jobs.get()), backend.check))
        except Fault as fault:
            verdict = Verdict(None, fault.message, fault.path, fault.unsupported)
        except MemoryError:
            verdict = Verdict(None, "it needs too much memory to compile")
        except Exception as error:  # of llguidance: the request is at fault, or we are; it is not served
            verdict = Verdict(None, f"it cannot be compiled: {' '.join(str(error).split())[:300]}")
        _answer(verdict)


def _read_frames(stream: BinaryIO, jobs: queue.SimpleQueue[bytes]) -> None:
    while True:
        header = stream.read(LENGTH_BYTES)
        data = stream.read(int.from_bytes(header, "big")) if len(header) == LENGTH_BYTES else b""
        if not data:
            os._exit(0)  # the parent is gone; whatever is being compiled, nobody waits for it
        jobs.put(data)


def _answer(verdict: Verdict) -> None:
    try:
        sys.stdout.buffer.write(frame(verdict))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(0)


def _hush() -> None:
    """What a library says on stderr while it panics may quote what it was given, which belongs into no log."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _limit(most_bytes: int) -> None:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    if most_bytes and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


if __name__ == "__main__":
    sys.exit(main())
