"""The four best of six beams, offline, with their scores; and what their shared pages saved.

python examples/beams.py [MODEL]
"""

import sys

from pinnate import LLM

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    (result,) = llm.beam_search("The capital of France is", beam_width=6, n=4, max_tokens=16, length_penalty=0.8)
    for output in result.outputs:
        print(f"{output.score:8.3f}  {output.text!r}")
    stats = llm.stats()
    print(f"pages saved: {1 - stats.beam_page_steps / stats.beam_lone_page_steps:.0%}")
