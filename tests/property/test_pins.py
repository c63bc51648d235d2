"""Pins among everything else that happens to the KV memory: what is pinned is there, byte for byte."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from pinnate.core.errors import InvalidRequestError
from pinnate.kvcache.pins import Pins
from tests.property.slot_memory import prefix_hashes
from tests.property.test_kv_manager import KVManagerMachine


class PinMachine(KVManagerMachine):
    pins: Pins

    def pinnable(self) -> Pins:
        if not hasattr(self, "pins"):
            self.cache.pinnable_pages = self.cache.num_pages // 2
            self.pins = Pins(self.cache)
        return self.pins

    @rule(which=st.integers(0), cut=st.integers(0, 40))
    def pin(self, which: int, cut: int) -> None:
        tokens = self.known[which % len(self.known)][:cut]
        whole = len(tokens) - len(tokens) % self.page_size
        if not self.cache.enable_prefix_caching or not whole:
            return
        pins = self.pinnable()
        seq = self.new_sequence(tokens)
        del self.live[seq.seq_id]
        cached = self.cache.match(seq, whole)
        before = {page for pin in pins.all() for page in pin.seq.page_table}
        wanted = len(before) + whole // self.page_size - len(before & set(cached.pages))
        try:
            pin = pins.pin(tokens)
        except InvalidRequestError:
            assert wanted > self.cache.pinnable_pages
            assert {page for pin in pins.all() for page in pin.seq.page_table} == before
            return
        assert (pin is None) == (cached.num_tokens < whole)
        assert wanted <= self.cache.pinnable_pages
        assert pins.num_pages == (wanted if pin is not None else len(before))

    @rule(which=st.integers(0))
    def unpin(self, which: int) -> None:
        pins = self.pins.all() if hasattr(self, "pins") else []
        if pins:
            self.pins.unpin(pins[which % len(pins)].pin_id)

    @rule()
    def pinned_prefixes_are_there(self) -> None:
        for pin in self.pins.all() if hasattr(self, "pins") else []:
            assert self.cache.match(pin.seq, pin.num_tokens).pages == pin.seq.page_table
            self.memory.check(pin.seq.page_table, prefix_hashes(pin.seq.token_ids), pin.num_tokens)

    def num_tables(self, page: int) -> int:
        pinned = sum(page in pin.seq.page_table for pin in self.pins.all()) if hasattr(self, "pins") else 0
        return super().num_tables(page) + pinned

    def newly_held(self, copies: tuple[tuple[int, int], ...]) -> int:
        return sum(1 for source, _ in copies if not self.num_tables(source))

    def teardown(self) -> None:
        if hasattr(self, "pins"):
            self.pinned_prefixes_are_there()
            for pin in self.pins.all():
                self.pins.unpin(pin.pin_id)
        super().teardown()


PinMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPins = PinMachine.TestCase
