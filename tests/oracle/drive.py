"""Driving an EngineCore in a test, one part of the work after the other."""

from __future__ import annotations

from collections.abc import Iterable

from pinnate.core.messages import StepOutputs, TokenOutput
from pinnate.core.request import Request
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox


def run_to_end(core: EngineCore, mailbox: Mailbox, requests: Iterable[Request]) -> list[TokenOutput]:
    """All outputs of the requests, in order; none of them is an error."""
    mailbox.inbox += requests
    core.step()
    while not core.is_idle:
        core.step()
    outputs: list[TokenOutput] = []
    for message in mailbox.collect():
        assert isinstance(message, StepOutputs)
        outputs += message.outputs
    assert all(output.error is None for output in outputs)
    return outputs
