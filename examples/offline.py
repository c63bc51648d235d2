"""Generate for a list of prompts, offline: no server, one process.

python examples/offline.py [MODEL]
"""

import sys

from pinnate import LLM, SamplingParams

prompts = ["The capital of France is", "1, 2, 3, 4, 5, 6, 7,", "Once upon a time"]

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    for result in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24)):
        print(repr(result.prompt), "->", repr(result.outputs[0].text))
