"""KV memory: which page holds which token of which sequence. Integers only; the bytes are the executor's."""
