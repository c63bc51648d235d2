"""The loop, with the real scheduler and an executor that computes tokens from what its pages hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.fakes import EOS, FakeExecutor, expected_tokens, make_request

from pinnate.core.batch import SchedulerOutput
from pinnate.core.errors import InvalidRequestError
from pinnate.core.messages import Abort, Command, EngineStats, FromEngine, Reply, StepOutputs, ToEngine, TokenOutput
from pinnate.core.request import FinishReason, Request
from pinnate.core.structured import StructuredOutput
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox
from pinnate.kvcache.manager import KVCacheManager
from pinnate.scheduler.output import take_timing
from pinnate.scheduler.scheduler import Scheduler
from pinnate.scheduler.state import RequestState

PAGE_SIZE = 4


class Rig:
    def __init__(self, num_pages: int = 64, fail_when: Callable[[SchedulerOutput], bool] | None = None) -> None:
        cache = KVCacheManager(num_pages=num_pages, page_size=PAGE_SIZE)
        self.scheduler = Scheduler(
            cache, policy="fcfs", max_num_seqs=8, max_num_batched_tokens=16, max_model_len=128, max_num_queued_reqs=8
        )
        self.executor = FakeExecutor(PAGE_SIZE, fail_when=fail_when)
        self.mailbox = Mailbox()
        self.core = EngineCore(self.scheduler, self.executor, self.mailbox, check_integrity=True)

    def step(self, *messages: ToEngine) -> list[FromEngine]:
        self.mailbox.inbox += messages
        self.core.step()
        return self.mailbox.collect()

    def run(self, *messages: ToEngine) -> list[TokenOutput]:
        """Until there is nothing to do."""
        outputs = token_outputs(self.step(*messages))
        while not self.core.is_idle:
            outputs += token_outputs(self.step())
        return outputs


def token_outputs(messages: list[FromEngine]) -> list[TokenOutput]:
    return [output for message in messages if isinstance(message, StepOutputs) for output in message.outputs]


def tokens_of(outputs: list[TokenOutput], request_id: str, index: int = 0) -> list[int]:
    mine = [output for output in outputs if (output.request_id, output.index) == (request_id, index)]
    assert mine[-1].finish_reason is not None
    return [token for output in mine for token in output.token_ids]


def requests(count: int, length: int, **sampling: object) -> list[Request]:
    return [make_request(f"r{i}", [(i * 7 + j) % 256 for j in range(length)], **sampling) for i in range(count)]


def test_every_request_gets_its_own_tokens() -> None:
    rig, batch = Rig(), requests(6, 10)
    outputs = rig.run(*batch)
    for request in batch:
        assert tokens_of(outputs, request.request_id) == expected_tokens(request)


def test_tokens_do_not_change_with_memory_so_small_that_requests_are_preempted() -> None:
    rig, batch = Rig(num_pages=12), requests(6, 10, max_tokens=30)
    outputs = rig.run(*batch)
    for request in batch:
        assert tokens_of(outputs, request.request_id) == expected_tokens(request)
    assert rig.core.stats().preemptions > 0


def test_choices_of_one_prompt_differ_by_index_only() -> None:
    request = make_request("r", range(10), n=3, temperature=1.0, seed=5)
    outputs = Rig().run(request)
    tokens = [tokens_of(outputs, "r", index) for index in range(3)]
    assert tokens == [expected_tokens(request, index) for index in range(3)]
    assert tokens[0] != tokens[1]


def test_eos_ends_and_is_the_last_token() -> None:
    rig = Rig()
    rig.executor.script = lambda prefix: EOS if len(prefix) == 6 else 65
    (*_, last) = rig.run(make_request("r", [1, 2, 3], eos_token_ids=(EOS,)))
    assert (last.token_ids, last.finish_reason, last.stop_token) == ([EOS], FinishReason.STOP, EOS)


def test_one_message_a_step_even_for_a_chunk_without_tokens() -> None:
    rig = Rig()
    (message,) = rig.step(make_request("r", range(40)))
    assert message.outputs == []
    assert message.stats.num_running == 1
    assert len(rig.step()) == 1


def test_an_idle_core_asks_its_port_to_wait() -> None:
    asked = []

    class Port(Mailbox):
        def receive(self, wait: bool) -> list[ToEngine]:
            asked.append(wait)
            return super().receive(wait)

    rig = Rig()
    port = Port()
    core = EngineCore(rig.scheduler, rig.executor, port)
    port.inbox.append(make_request("r", [1], max_tokens=2))
    for _ in range(4):
        core.step()
    assert asked == [True, False, False, True]
    assert len(rig.executor.batches) == 2


def test_a_failing_step_ends_its_requests_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: SchedulerOutput) -> bool:
        return any(99 in sequence.token_ids for sequence in batch.sequences)

    rig = Rig(fail_when=fail)
    outputs = rig.run(make_request("bad", [99] * 5, n=2))
    assert [(o.request_id, o.index, o.finish_reason) for o in outputs] == [
        ("bad", 0, FinishReason.ERROR),
        ("bad", 1, FinishReason.ERROR),
    ]
    assert "RuntimeError: the fake executor was told to fail" in outputs[0].error
    assert "1 in a row" in caplog.text
    rig.run(make_request("bad2", [99]))
    assert "2 in a row" in caplog.text
    (good,) = requests(1, 10)
    assert tokens_of(rig.run(good), "r0") == expected_tokens(good)
    rig.run(make_request("bad3", [99]))
    assert "3 in a row" not in caplog.text


def test_a_bug_of_the_scheduler_ends_the_loop() -> None:
    rig = Rig()
    rig.executor.execute = lambda _batch: None
    with pytest.raises(AttributeError):
        rig.run(make_request("r", [1]))


def test_refused_request_ends_with_the_reason() -> None:
    outputs = Rig().run(make_request("big", range(120), max_tokens=100, n=2))
    assert [o.finish_reason for o in outputs] == [FinishReason.ERROR] * 2
    assert "220" in outputs[0].error


def test_abort() -> None:
    rig = Rig()
    rig.step(make_request("r", [1, 2], max_tokens=50, n=2))
    (one,) = [o for o in token_outputs(rig.step(Abort(["r"], 1))) if o.finish_reason]
    assert (one.index, one.finish_reason) == (1, FinishReason.ABORT)
    (other,) = [o for o in token_outputs(rig.step(Abort(["r", "unknown"]))) if o.finish_reason]
    assert (other.index, other.finish_reason) == (0, FinishReason.ABORT)
    assert not rig.scheduler.has_work()


def test_commands() -> None:
    rig = Rig()
    rig.run(make_request("r", range(10)))
    cached = rig.core.stats().num_cached_pages
    assert cached > 0
    sent = [rig.step(Command(i, name)) for i, name in enumerate(("stats", "check_integrity", "flush_cache", "sing"))]
    replies = [messages[-1] for messages in sent]
    assert replies[0].result["generation_tokens"] == 8
    assert replies[1] == Reply(1, {"ok": True})
    assert replies[2] == Reply(2, {"freed_pages": cached})
    assert replies[3] == Reply(3, {}, error="unknown command 'sing'")
    # The stats come before the reply and show the command's effect.
    assert [messages[0].stats.num_cached_pages for messages in sent] == [cached, cached, 0, 0]


def test_memory_that_the_executor_has_taken_is_in_the_stats_of_each_step() -> None:
    rig = Rig()
    rig.executor.kv_committed_bytes = 7_000
    messages = rig.step(make_request("r", range(10)))
    assert messages[-1].stats.kv_committed_bytes == rig.core.stats().kv_committed_bytes == 7_000


def test_time_is_counted() -> None:
    rig = Rig()
    assert rig.core.stats() == EngineStats(
        num_pages=64, num_free_pages=64, new_token_ratio=rig.core.stats().new_token_ratio
    )
    rig.run(make_request("r", range(10)))
    stats = rig.core.stats()
    assert stats.steps == len(rig.executor.batches) == 8
    assert 0 < stats.execute_seconds < stats.step_seconds


def test_what_a_step_took_is_told_to_the_scheduler_unless_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[int, int, float]] = []
    rig = Rig(fail_when=lambda output: any(part.start == 12 for part in output.sequences))
    monkeypatch.setattr(rig.scheduler._pace, "note", lambda *step: noted.append(step))
    rig.run(make_request("a", range(10)))
    assert [step[:2] for step in noted] == [(0, 10), (1, 0), (1, 0)]
    assert sum(seconds for *_, seconds in noted) < rig.core.stats().execute_seconds


class Listener:
    def __init__(self) -> None:
        self.steps = 0
        self.closed = False

    def publish(self) -> None:
        self.steps += 1

    def close(self) -> None:
        self.closed = True


def test_events_are_published_once_a_step_commands_included_and_closed_in_the_end() -> None:
    rig, listener = Rig(), Listener()
    rig.core = EngineCore(rig.scheduler, rig.executor, rig.mailbox, events=listener)
    rig.run(make_request("r", range(10)))
    assert listener.steps >= len(rig.executor.batches)
    before = listener.steps
    rig.step(Command(1, "flush_cache"))
    assert listener.steps == before + 1
    rig.core.close()
    assert listener.closed


def test_commands_from_outside_are_answered_and_their_refusals_are_told_from_faults() -> None:
    def refuse(_arguments: dict[str, object]) -> dict[str, object]:
        raise InvalidRequestError("no", param="prompt", code="pin_quota_exceeded")

    rig = Rig()
    commands = {"echo": lambda arguments: arguments, "refuse": refuse, "break": lambda arguments: arguments["x"]}
    rig.core = EngineCore(rig.scheduler, rig.executor, rig.mailbox, commands=commands)
    sent = [Command(1, "echo", {"a": 1}), Command(2, "refuse"), Command(3, "break")]
    replies = [rig.step(command)[-1] for command in sent]
    assert replies[0] == Reply(1, {"a": 1})
    assert replies[1] == Reply(2, {}, "no", "InvalidRequestError", "prompt", "pin_quota_exceeded")
    assert replies[2] == Reply(3, {}, "KeyError: 'x'")


def test_without_a_compiler_structured_outputs_are_refused_and_their_aborts_leave_nothing() -> None:
    rig, structured = Rig(), StructuredOutput(kind="regex", text="[0-9]+")
    refused = rig.run(make_request("r", [1], structured_output=structured, n=2), make_request("plain", [1]))
    errors = [output.error for output in refused if output.request_id == "r"]
    assert errors == ["this engine compiles no structured outputs"] * 2
    assert tokens_of(refused, "plain") == expected_tokens(make_request("plain", [1]))
    left = rig.run(make_request("left", [1], structured_output=structured), Abort(["left"]))
    assert [output.finish_reason for output in left] == [FinishReason.ABORT]
    assert rig.core.stats().num_waiting == 0
    rig.core.close()


def test_close_closes_the_executor() -> None:
    rig = Rig()
    rig.core.close()
    assert rig.executor.closed


def test_the_end_of_a_wait_is_told_once() -> None:
    rig = Rig()
    long, short = make_request("long", range(40), max_tokens=2), make_request("short", [1], max_tokens=2)
    told = []
    messages: list[ToEngine] = [long, short, make_request("left", [2]), Abort(["left"])]
    while not rig.core.is_idle or messages:
        told.append([m.started for m in rig.step(*messages) if isinstance(m, StepOutputs)])
        messages = []
    started = [[name for message in step for name in message] for step in told]
    assert started[0] == ["long"]
    assert sorted(name for step in started for name in step) == ["long", "short"]


@pytest.mark.parametrize("num_pages", [64, 12])  # with 12, requests are preempted and start again
def test_the_first_output_of_a_request_tells_how_long_it_waited_and_computed(num_pages: int) -> None:
    rig = Rig(num_pages)
    outputs = rig.run(*requests(6, 10, max_tokens=30, n=1), make_request("n", range(10), n=3, max_tokens=2))
    timed = [output for output in outputs if output.timing is not None]
    assert len({output.request_id for output in timed}) == len(timed) == 7
    firsts = {output.request_id: output for output in reversed(outputs)}
    for output in timed:
        assert firsts[output.request_id] is output
        assert output.timing is not None
        assert output.timing.prefill_seconds is not None
        assert 0 <= output.timing.queue_seconds < 60
        assert 0 < output.timing.prefill_seconds < 60
    waits = [output.timing.queue_seconds for output in timed if output.timing is not None]
    assert max(waits) > min(waits)


def test_a_beam_search_tells_its_wait_alone_and_once() -> None:
    state = RequestState.of(make_request("b", range(10), n=2, use_beam_search=True), 1)
    state.started = state.arrived + 0.5
    timing = take_timing(state, whole=True)
    assert timing is not None
    assert (timing.queue_seconds, timing.prefill_seconds) == (pytest.approx(0.5), None)
    assert take_timing(state) is None


def test_stats_tell_the_tokens_of_the_latest_step() -> None:
    rig = Rig()
    request = make_request("r", range(20), max_tokens=3)
    sizes = [message.stats.step_tokens for message in rig.step(request) if isinstance(message, StepOutputs)]
    while not rig.core.is_idle:
        sizes += [message.stats.step_tokens for message in rig.step() if isinstance(message, StepOutputs)]
    assert sizes == [16, 4, 1, 1]
