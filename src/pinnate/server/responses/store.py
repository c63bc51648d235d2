"""What can be asked for after it was answered: responses, and the conversations they belong to.

Knows: ids, sizes, ages, who owns what. Must not know: HTTP, how a response comes to be. Here is what all stores have in
common, and the one in this process's memory, which a restart forgets; with --data-dir it is that of `disk_store.py`.
The bounds are a number of responses, bytes of JSON, and an age of 30 days as OpenAI's; in memory what was used longest
ago goes first.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pinnate.core.errors import InvalidRequestError, NotFoundError
from pinnate.server.protocol.responses import Response
from pinnate.server.responses.items import Item

MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 2**20
LIFETIME_SECONDS = 30 * 24 * 3600.0
ENDED = ("completed", "incomplete", "failed", "cancelled")


class Turn:
    """What one response adds to a conversation: its input and its output. Turns share those before them.

    `holders` counts who needs it: its record while that is stored, and each turn that follows it. `number`: its row in
    a database.
    """

    __slots__ = ("before", "holders", "input", "number", "output", "size")

    def __init__(self, before: Turn | None, items: list[Item], number: int | None = None) -> None:
        self.before = before
        self.input = items
        self.output: list[Item] = []
        self.number = number
        self.size = 0
        self.holders = 0

    def items(self) -> list[Item]:
        """The conversation before this turn, and its input; without its output."""
        turns: list[Turn] = []
        turn = self.before
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        earlier = [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]
        return [*earlier, *self.input]


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """One response, from its start on. `events` are those of a stream that can be resumed; event i has the sequence
    number i. `changed` is set, and replaced, whenever there is more to see. `cancel` ends a background response."""

    response: Response
    turn: Turn
    namespace: str = ""
    events: list[bytes] | None = None
    snapshot: Callable[[], Response] | None = None
    cancel: Callable[[], object] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stored_at: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        return self.response.id

    @property
    def ended(self) -> bool:
        return self.response.status in ENDED

    def current(self) -> Response:
        return self.response if self.ended or self.snapshot is None else self.snapshot()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def end(self, response: Response, events: Sequence[bytes] = ()) -> None:
        """Shows its last state, and the last events where they are kept."""
        self.response, self.snapshot, self.cancel = response, None, None
        if self.events is not None:
            self.events += events
        self.notify()


class Store(Protocol):
    """A namespace never sees another one's responses.

    Raises: NotFoundError (all that take an id), StorageError (of a store on disk; never `settle`).
    """

    async def add(self, record: Record) -> None:
        """From here on it can be found."""
        ...

    async def settle(self, record: Record, response: Response, events: Sequence[bytes] = ()) -> None:
        """The record ends as `response`, with these last events: its output joins the conversation, and it may be
        dropped from now on. It is stored before it is shown."""
        ...

    async def get(self, namespace: str, response_id: str) -> Record: ...

    async def delete(self, namespace: str, response_id: str) -> None:
        """Ends it, too, if it is still being made."""
        ...

    async def find_items(self, namespace: str, item_ids: Collection[str]) -> dict[str, Item]:
        """Those that are stored, by their id."""
        ...


class MemoryStore:
    """A Store in memory. What is still being made is never dropped; the engine's own limits bound how much that is."""

    def __init__(
        self,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        lifetime: float = LIFETIME_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lifetime = lifetime
        self._clock = clock
        self._records: OrderedDict[tuple[str, str], Record] = OrderedDict()  # least recently used first
        self._items: dict[tuple[str, str], tuple[Turn, Item]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    async def add(self, record: Record) -> None:
        record.stored_at = self._clock()
        self._records[record.namespace, record.id] = record
        self._hold(record.turn, record.namespace)
        self._resize(record.turn, _size(record))
        self._trim()

    async def settle(self, record: Record, response: Response, events: Sequence[bytes] = ()) -> None:
        record.end(response, events)
        if (record.namespace, record.id) not in self._records:
            return  # deleted meanwhile
        turn = record.turn
        turn.output = msgspec.to_builtins(record.response.output)
        for item in turn.output:
            self._items[record.namespace, item["id"]] = (turn, item)
        self._resize(turn, _size(record))
        self._trim()

    async def get(self, namespace: str, response_id: str) -> Record:
        record = self._records.get((namespace, response_id))
        if record is not None and record.ended and self._clock() - record.stored_at > self._lifetime:
            self._drop(record)
            record = None
        if record is None:
            raise not_found(response_id)
        self._records.move_to_end((namespace, response_id))
        return record

    async def delete(self, namespace: str, response_id: str) -> None:
        record = await self.get(namespace, response_id)
        if record.cancel is not None:
            record.cancel()
        self._drop(record)

    async def find_items(self, namespace: str, item_ids: Collection[str]) -> dict[str, Item]:
        found = {item_id: self._items.get((namespace, item_id)) for item_id in item_ids}
        return {item_id: entry[1] for item_id, entry in found.items() if entry is not None}

    def _trim(self) -> None:
        """Drops ended records, the newest excepted, until the bounds hold."""
        while self._is_over():
            newest = next(reversed(self._records.values()))
            oldest = next((r for r in self._records.values() if r.ended and r is not newest), None)
            if oldest is None:
                return
            self._drop(oldest)

    def _is_over(self) -> bool:
        return len(self._records) > self._max_responses or self.num_bytes > self._max_bytes

    def _drop(self, record: Record) -> None:
        del self._records[record.namespace, record.id]
        turn: Turn | None = record.turn
        while turn is not None:
            turn.holders -= 1
            if turn.holders:  # part of a conversation that goes on
                self._resize(turn, len(msgspec.json.encode((turn.input, turn.output))))
                return
            self._resize(turn, 0)
            for item in (*turn.input, *turn.output):
                if self._items.get((record.namespace, item["id"]), (None,))[0] is turn:
                    del self._items[record.namespace, item["id"]]
            turn = turn.before

    def _hold(self, turn: Turn, namespace: str) -> None:
        for item in turn.input:
            self._items[namespace, item["id"]] = (turn, item)
        turn.holders += 1
        if turn.before is not None:
            turn.before.holders += 1

    def _resize(self, turn: Turn, size: int) -> None:
        self.num_bytes += size - turn.size
        turn.size = size


def _size(record: Record) -> int:
    """Bytes of JSON that the record alone is the reason for: its response, its own items, its events."""
    own: Any = (record.response, record.turn.input, record.turn.output)
    return len(msgspec.json.encode(own)) + sum(map(len, record.events or ()))


def not_found(response_id: str) -> NotFoundError:
    shown = response_id if len(response_id) <= 128 else response_id[:128] + "..."
    return NotFoundError(f"Response with id '{shown}' not found.", param="id", code="response_not_found")


def previous_not_found(response_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"Previous response with id '{response_id[:128]}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


async def previous_turn(store: Store, namespace: str, response_id: str) -> Turn:
    """
    Raises:
        InvalidRequestError: not stored (any more), or not finished yet.
        StorageError: as the store.
    """
    try:
        record = await store.get(namespace, response_id)
    except NotFoundError:
        raise previous_not_found(response_id) from None
    if not record.ended:
        raise InvalidRequestError(
            f"previous_response_id: the response {record.id} is still {record.response.status}",
            param="previous_response_id",
        )
    return record.turn
