"""Anthropic's Messages API: a request becomes chat fields, a chat's segments become content blocks and their events.

A request's way: `request.py` (with `blocks.py`) -> chat -> Job -> `assembler.py` -> `writer.py`; `routes.py` is HTTP.
"""
