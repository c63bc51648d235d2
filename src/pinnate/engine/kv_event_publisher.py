"""KV events on their way out: a ZeroMQ PUB stream with sequence numbers, and a socket that repeats what was missed.

Knows: frames, queues, the thread that serves them. Must not know: why the tree changed.

Frames of the stream: topic, sequence number (8 bytes, big endian), msgpack of an EventBatch. A subscriber that sees a
gap asks the replay socket with the first number it lacks (8 bytes) and gets (number, batch) for each that is still
buffered, then (-1, empty). Numbers begin at 0 with AllBlocksCleared, in each engine process anew.

The engine's thread numbers a batch, puts it into a bounded queue and never waits. A batch that finds the queue full is
lost, which its number tells; once there is room again the next batch is the whole tree, so that the stream is exact
again. A slow subscriber loses batches in ZeroMQ (`hwm`), alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from time import time

import msgspec
import zmq

from pinnate.core.errors import ConfigError
from pinnate.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent, KVEventsConfig
from pinnate.kvcache.event_log import Change, Cleared
from pinnate.kvcache.page_hashes import StoredPages, namespace_label

log = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
CLOSE_SECONDS = 2.0


class KVEventPublisher:
    """One of an engine, used in the engine's thread. Everything on sockets happens in a thread of its own."""

    def __init__(
        self,
        config: KVEventsConfig,
        page_size: int,
        take: Callable[[], list[Change]],
        snapshot: Callable[[], list[Change]],
    ) -> None:
        """`take` gives what changed since its last call, `snapshot` the changes from nothing to what is now.

        Raises:
            ConfigError: an address cannot be bound.
        """
        self._take = take
        self._snapshot = snapshot
        self._limit = config.max_queue_size
        self._queue: deque[tuple[int, float, list[Change]]] = deque()
        self._next = 0
        self._lossy = False  # a batch was lost: the next one must be a snapshot
        self.num_lost = 0
        self._wake, self._woken = os.pipe()[::-1]
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        try:
            self._server = _Server(config, page_size, self._queue, self._woken)
        except ConfigError:
            os.close(self._wake)
            os.close(self._woken)
            raise
        self._put([Cleared()])
        self._server.start()

    def publish(self) -> None:
        changes = self._take()
        if changes or self._lossy:
            self._put(changes)

    def resync(self) -> int:
        """Publishes the whole tree, for subscribers that have lost more than can be replayed; returns its number."""
        self.publish()
        self._put(self._snapshot())
        return self._next - 1

    def close(self) -> None:
        """What was put is sent first, for at most CLOSE_SECONDS. A second call has no effect."""
        if self._server.stopping:
            return
        self.publish()
        self._server.stopping = True
        self._signal()
        self._server.join(CLOSE_SECONDS)
        os.close(self._wake)

    def _put(self, changes: list[Change]) -> None:
        number, self._next = self._next, self._next + 1
        if len(self._queue) >= self._limit:
            if not self._lossy:
                log.warning("KV events: the queue of %d batches is full; a snapshot follows", self._limit)
            self._lossy = True
            self.num_lost += 1
            return
        if self._lossy:
            self._lossy = False
            changes = self._snapshot()
        self._queue.append((number, time(), changes))
        self._signal()

    def _signal(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            os.write(self._wake, b"\0")


class _Server(threading.Thread):
    """Owns the sockets and the buffer of sent batches."""

    def __init__(
        self,
        config: KVEventsConfig,
        page_size: int,
        queue: deque[tuple[int, float, list[Change]]],
        woken: int,
    ) -> None:
        super().__init__(name="pinnate-kv-events", daemon=True)
        self.stopping = False
        self._page_size = page_size
        self._queue = queue
        self._woken = woken
        self._topic = config.topic.encode()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._stream = self._bind(zmq.PUB, config.endpoint, config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._replay = self._bind(zmq.ROUTER, config.replay_endpoint, config.buffer_steps + 1)

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            stopping = self.stopping  # before the queue is emptied, so that nothing put earlier is left
            self._send_all()
            if stopping:
                break
            for ready, _ in poller.poll():
                if ready == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 65536)
                else:
                    self._answer_replay()
        self._context.destroy(linger=int(CLOSE_SECONDS * 500))
        os.close(self._woken)

    def _bind(self, kind: int, address: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"--kv-events-config: {address!r} cannot be bound: {error}") from None
        return socket

    def _send_all(self) -> None:
        while self._queue:
            number, stamp, changes = self._queue.popleft()
            batch = EventBatch(stamp, [to_event(change, self._page_size) for change in changes])
            name, payload = number.to_bytes(8, "big"), self._encoder.encode(batch)
            self._sent.append((name, payload))
            self._stream.send_multipart((self._topic, name, payload))

    def _answer_replay(self) -> None:
        assert self._replay is not None
        *envelope, asked = self._replay.recv_multipart()
        if len(asked) != 8:
            log.warning("KV events: a replay request of %d bytes instead of 8 is ignored", len(asked))
            return
        for name, payload in self._sent:
            if name >= asked:  # big endian: bytes compare as numbers do
                self._replay.send_multipart((*envelope, name, payload))
        self._replay.send_multipart((*envelope, END_OF_REPLAY, b""))


def to_event(change: Change, page_size: int) -> KVEvent:
    if isinstance(change, StoredPages):
        adapter, salt = change.namespace
        label = namespace_label(("", salt))
        return BlockStored(
            block_hashes=change.hashes,
            parent_block_hash=change.parent,
            token_ids=change.tokens.tolist(),
            block_size=page_size,
            lora_id=None,
            medium=None,
            lora_name=adapter or None,
            extra_keys=[[label]] * len(change.hashes) if salt else None,
        )
    if isinstance(change, Cleared):
        return AllBlocksCleared()
    return BlockRemoved(list(change), None)
