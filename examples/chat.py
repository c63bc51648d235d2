"""Two conversations at once, offline; the second asks for three answers from one computed prompt.

python examples/chat.py [MODEL]
"""

import sys

from pinnate import LLM, SamplingParams

conversations = [
    [{"role": "user", "content": "Name three colours."}],
    [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": "What is a leaf?"}],
]
params = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(n=3, temperature=0.8, seed=7, max_tokens=40),
]

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    for conversation, result in zip(conversations, llm.chat(conversations, params), strict=True):
        print("user:", conversation[-1]["content"])
        for output in result.outputs:
            print(f"  answer {output.index} ({output.finish_reason}):", output.text.strip())
