"""OpenAI's Responses API: a request becomes chat fields, a chat's events become items and events of this API.

A request's way: `request.py` (with `items.py`) -> chat -> Job -> `assembler.py` -> `writer.py`. `store.py` keeps what
can be asked for later, `background.py` runs what nobody waits for, `routes.py` is HTTP.
"""
