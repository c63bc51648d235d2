"""Records beam searches of transformers on the tiny checkpoints (fp32, CPU): tests/data/beams.json.

Run by hand in an environment with torch and transformers; the tests need neither. EOS is a token that the model
likes, so that hypotheses end at many lengths.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
PROMPTS = [[5, 17, 3, 41, 8], [60, 2, 33]]
WIDTHS = [1, 2, 4, 7]
PENALTIES = [0.0, 1.0, 2.0, -1.0]
EARLY = [False, True, "never"]
MAX_NEW_TOKENS = 12


def likely_tokens(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, -1].topk(8).indices.tolist()


def record(name: str) -> list[dict[str, object]]:
    model = AutoModelForCausalLM.from_pretrained(HERE / "tiny" / name, dtype=torch.float32).eval()
    cases = []
    for prompt, width, penalty, early in itertools.product(PROMPTS, WIDTHS, PENALTIES, EARLY):
        if width == 1 and (penalty, early) != (1.0, False):  # greedy search there: neither matters
            continue
        likely = likely_tokens(model, prompt)
        for eos in ([], [likely[1]], [likely[3], likely[6]]):
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                num_beams=width,
                num_return_sequences=width,
                length_penalty=penalty,
                early_stopping=early,
                max_new_tokens=MAX_NEW_TOKENS,
                eos_token_id=eos or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            scores = [round(score, 6) for score in out.sequences_scores.tolist()] if width > 1 else [None]
            outputs = [cut(ids, eos) for ids in out.sequences[:, len(prompt) :].tolist()]
            cases.append(
                {
                    "model": name,
                    "prompt": prompt,
                    "beam_width": width,
                    "length_penalty": penalty,
                    "early_stopping": early,
                    "eos": eos,
                    "max_tokens": MAX_NEW_TOKENS,
                    "outputs": outputs,
                    "scores": scores,
                }
            )
    return cases


def cut(ids: list[int], eos: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(ids) if token in eos]
    return ids[: ends[0] + 1] if ends else ids


if __name__ == "__main__":
    recorded = [case for name in ("llama2", "qwen3") for case in record(name)]
    lines = ",\n".join(json.dumps(case) for case in recorded)
    (HERE / "beams.json").write_text(f"[\n{lines}\n]\n")
