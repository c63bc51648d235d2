"""What a precision costs: perplexity and top token against fp32 on a fixed text, teacher-forced.

    python benchmarks/accuracy.py [--model MODEL] [--facts tests/data/smollm2_forced.json] [--precisions int8,int4]
        [--out FILE.json]

`--facts` holds the text's token ids and what fp32 says: its top token, the distance to the second one, and the
log-probability of the token that follows. The default's are of transformers in fp32 with the weights of the default
model's GGUF file decoded, so every difference is the engine's: of its arithmetic, and of weights rounded once more.
With another model give facts of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pinnate import LLM, SamplingParams

FACTS = Path(__file__).parents[1] / "tests" / "data" / "smollm2_forced.json"
PRECISIONS: Mapping[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
CLEAR_MARGIN = 0.3  # logits between the first and the second token; below, rounding may well swap them


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares are of all positions; `logprob_error` is the root mean square of the differences in log-probability."""

    precision: str
    perplexity: float
    reference_perplexity: float
    same_top: float
    same_clear_top: float  # of the positions where fp32 is decided
    logprob_error: float
    weight_bytes: int

    @property
    def perplexity_change(self) -> float:
        return self.perplexity / self.reference_perplexity - 1


def measure(precision: str, facts: Mapping[str, Any], model: str | None = None, **config: Any) -> Accuracy:
    """Scores the text as one prompt. `config`: more fields of EngineConfig."""
    ids = facts["token_ids"]
    settings = PRECISIONS[precision] | {"max_num_seqs": 1, "max_model_len": len(ids) + 1} | config
    with LLM(model, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        result = llm.generate([ids], params, use_tqdm=False)[0]
        weight_bytes = int(llm.info["device"]["weight_bytes"])
    assert result.prompt_logprobs is not None
    scored = [entry for entry in result.prompt_logprobs if entry is not None]
    tops = [entry.top[0][0] for entry in scored] + result.outputs[0].token_ids
    same = [ours == theirs for ours, theirs in zip(tops, facts["argmax_ids"], strict=True)]
    clear = [s for s, margin in zip(same, facts["margin_top2"], strict=True) if margin > CLEAR_MARGIN]
    errors = [e.logprob - theirs for e, theirs in zip(scored, facts["next_token_logprob"], strict=True)]
    return Accuracy(
        precision=precision,
        perplexity=math.exp(-statistics.fmean(entry.logprob for entry in scored)),
        reference_perplexity=float(facts["perplexity"]),
        same_top=statistics.fmean(same),
        same_clear_top=statistics.fmean(clear),
        logprob_error=math.sqrt(statistics.fmean(error**2 for error in errors)),
        weight_bytes=weight_bytes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--facts", type=Path, default=FACTS)
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    facts = json.loads(args.facts.read_text())
    print(f"{facts['source']}; {len(facts['token_ids'])} positions, fp32 perplexity {facts['perplexity']:.4f}")
    print("| precision | weights, MiB | perplexity | change | same top token | where clear | logprob error |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for precision in args.precisions.split(","):
        row = measure(precision, facts, args.model)
        rows.append(asdict(row))
        print(
            f"| {precision} | {row.weight_bytes / 2**20:.1f} | {row.perplexity:.4f} | {row.perplexity_change:+.3%} "
            f"| {row.same_top:.2%} | {row.same_clear_top:.2%} | {row.logprob_error:.4f} |",
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
