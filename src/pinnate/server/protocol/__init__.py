"""The API's shapes as msgspec structs, a module for each API: what a body may hold, what an answer looks like.

Knows: names, types, defaults of OpenAI's API and of the extra fields that vLLM's users send. Must not know: ranges
(they are `SamplingParams`' business), the engine, HTTP. Answers: a key that OpenAI always sends is always there, null
if need be; a key of ours that was not asked for is UNSET, which leaves it out.
"""
