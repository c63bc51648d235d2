"""Structured outputs: do they hold, and what do they cost?

    python benchmarks/structured.py [--model PATH] [--generations 500] [--suite FOLDER] [--out FILE]

Four parts, all in this process:
- generations: so many finished outputs over the schemas of tests/data/schemas.json (temperature 1, seeds), each
validated with `jsonschema`, formats included. Outputs that max_tokens cut are counted apart.
- cost: 32 rows decoding with masks against 32 rows without, in turns, the same work otherwise (log-probabilities asked
for, so that nothing is skipped); how long masks take in their thread, and how much of that the step waits for.
- forced: the same outputs with forced tokens skipped and drawn one by one.
- suite (with --suite: `json/tests/draft2020-12` of jsonschema's source distribution): for every schema that is taken,
no instance that the suite calls invalid is let through."""

from __future__ import annotations

import argparse
import contextlib
import decimal
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema

from pinnate import LLM, SamplingParams
from pinnate.core.structured import StructuredOutput
from pinnate.engine.engine_core import EngineCore
from pinnate.executor import masks
from pinnate.text.grammars import backend
from pinnate.text.grammars.check import check
from pinnate.text.grammars.faults import Fault

SCHEMAS = Path(__file__).parent.parent / "tests" / "data" / "schemas.json"
ROWS = 32
RECORDS = {  # masks of strings, numbers and punctuation, as extraction asks for them; never complete
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "n": {"type": "integer", "minimum": 0, "maximum": 999},
            "c": {"enum": ["red", "green"]},
        },
        "required": ["name", "n", "c"],
        "additionalProperties": False,
    },
}


def structured(schema: Any) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", text=json.dumps(schema, ensure_ascii=False))


def exact(text: str) -> Any:
    """JSON with decimal numbers: 1.12 is a multiple of 0.01."""
    return json.loads(text, parse_float=decimal.Decimal)


def validator_of(schema: Any) -> Any:
    schema = exact(json.dumps(schema))
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def generations(llm: LLM, wanted: int, max_tokens: int) -> dict[str, Any]:
    schemas = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    counts: dict[str, Counter[str]] = {name: Counter() for name in schemas}
    faults: list[str] = []
    seed = 0
    while sum(count["finished"] for count in counts.values()) < wanted:
        seed += 1
        params = [
            SamplingParams(structured_output=structured(schema), seed=seed, max_tokens=max_tokens)
            for schema in schemas.values()
        ]
        prompts = [f"An example of {name.replace('_', ' ')} in JSON:\n" for name in schemas]
        for (name, schema), result in zip(schemas.items(), llm.generate(prompts, params, use_tqdm=False), strict=True):
            output = result.outputs[0]
            if output.finish_reason != "stop":
                counts[name]["cut"] += 1
                continue
            counts[name]["finished"] += 1
            try:
                validator_of(schema).validate(exact(output.text))
                counts[name]["valid"] += 1
            except (ValueError, jsonschema.ValidationError) as error:
                faults.append(f"{name}, seed {seed}: {output.text!r}: {str(error).splitlines()[0]}")
    total = sum(counts.values(), Counter())
    return {
        "schemas": len(schemas),
        "finished": total["finished"],
        "valid": total["valid"],
        "cut_by_max_tokens": total["cut"],
        "max_tokens": max_tokens,
        "cut_by_schema": {name: count["cut"] for name, count in counts.items() if count["cut"]},
        "faults": faults,
    }


class Clock:
    """Notes how long each call of a function of a module or class takes, while it is in place."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name, self._inner = owner, name, getattr(owner, name)
        self.seconds: list[float] = []

    def __enter__(self) -> Clock:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return self._inner(*args)
            finally:
                self.seconds.append(time.perf_counter() - began)

        setattr(self._owner, self._name, timed)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._inner)


def cost(llm: LLM, rounds: int, tokens: int) -> dict[str, Any]:
    """Others use the machine too, and its pace drifts: each round compares the first octiles (an eighth of the steps
    were quicker) of two runs that follow each other, and what counts is the median of the rounds."""
    plain = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0)
    masked = SamplingParams(max_tokens=tokens, logprobs=0, structured_output=structured(RECORDS))
    times: dict[str, list[list[float]]] = {"plain": [], "masked": []}
    clocks = {
        "masks_ms_in_their_thread": Clock(masks, "_fill"),
        "masks_ms_waited_for": Clock(masks.MaskFiller, "wait"),
        "advance_ms": Clock(backend.GrammarMatcher, "advance"),
    }

    def steps(params: SamplingParams, number: int) -> list[float]:
        prompts = [f"{number}.{row} A list of people in JSON:\n" for row in range(ROWS)]
        with Clock(EngineCore, "step") as clock:
            llm.generate(prompts, [SamplingParams(**_with_seed(params, row)) for row in range(ROWS)], use_tqdm=False)
        return clock.seconds[8:]  # without those that compute prompts

    def quick(name: str) -> float:
        return statistics.quantiles(times[name][-1], n=8)[0]

    steps(masked, -1)  # threads, the trie, the grammar
    slower = []
    for number in range(rounds):
        times["plain"].append(steps(plain, 2 * number))
        with contextlib.ExitStack() as stack:
            for clock in clocks.values():
                stack.enter_context(clock)
            times["masked"].append(steps(masked, 2 * number + 1))
        slower.append(100 * (quick("masked") / quick("plain") - 1))
    whole = {name: [seconds for run in runs for seconds in run] for name, runs in times.items()}
    count = len(whole["masked"]) / 1e3
    return {
        "rows": ROWS,
        "steps": {name: len(values) for name, values in whole.items()},
        "step_ms": {name: round(1e3 * statistics.median(values), 3) for name, values in whole.items()},
        "slower_percent": round(statistics.median(slower), 2),
        "slower_percent_of_rounds": [round(min(slower), 2), round(max(slower), 2)],
        **{name: round(sum(clock.seconds) / count, 3) for name, clock in clocks.items()},
    }


def _with_seed(params: SamplingParams, seed: int) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__} | {"seed": seed}


def forced(llm: LLM, name: str) -> dict[str, Any]:
    schema = json.loads(SCHEMAS.read_text(encoding="utf-8"))[name]
    found: dict[str, Any] = {"schema": name}
    texts = {}
    for label, logprobs in (("drawn", 0), ("skipped", None)):
        params = SamplingParams(structured_output=structured(schema), max_tokens=400, logprobs=logprobs, seed=1)
        before, began = llm.stats(), time.perf_counter()
        results = llm.generate([f"{row}: JSON:\n" for row in range(ROWS)], params, use_tqdm=False)
        after = llm.stats()
        texts[label] = [result.outputs[0].token_ids for result in results]
        found[label] = {
            "seconds": round(time.perf_counter() - began, 3),
            "steps": after.steps - before.steps,
            "tokens": after.generation_tokens - before.generation_tokens,
            "forced_tokens": after.forced_tokens - before.forced_tokens,
        }
    found["same_tokens"] = texts["drawn"] == texts["skipped"]
    return found


def follows(compiled: backend.Grammar, ids: list[int], words: int) -> bool:
    """Whether a grammar lets the tokens through as a whole output."""
    matcher = compiled.start()
    for token in ids:
        mask = bytearray(words * 4)
        matcher.fill(memoryview(mask).cast("I"))
        if not mask[token // 8] >> token % 8 & 1:
            return False
        matcher.advance(token)
    return matcher.is_terminated or matcher.is_accepting


def suite(folder: Path) -> dict[str, Any]:
    """Tokens are bytes here, so that no way to write an instance is left out."""
    vocabulary = backend.VocabularyBytes([b"</s>", *(bytes([byte]) for byte in range(256))], [0], [0])
    compiler = backend.LLGuidanceBackend(vocabulary)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            try:
                taken = check(structured(group["schema"]), compiler.check)
            except Fault:
                counts["schemas_refused"] += 1
                continue
            counts["schemas_taken"] += 1
            compiled = compiler.compile(taken)
            for test in group["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False).encode()
                let = follows(compiled, [byte + 1 for byte in text], 9)
                counts[f"{'valid' if test['valid'] else 'invalid'}_{'let' if let else 'stopped'}"] += 1
                if let and not test["valid"]:
                    wrong.append(f"{path.stem}: {group['description']}: {test['description']}")
    return dict(sorted(counts.items())) | {"invalid_let_through": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--generations", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--parts", default="generations,cost,forced,suite")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    random.seed(0)
    parts: dict[str, Callable[[LLM], Any]] = {
        "generations": lambda llm: generations(llm, args.generations, args.max_tokens),
        "cost": lambda llm: cost(llm, args.rounds, 96),
        "forced": lambda llm: forced(llm, "twenty_properties"),
    }
    if args.suite is not None:
        parts["suite"] = lambda _: suite(args.suite)
    results: dict[str, Any] = {}
    if args.out is not None and args.out.exists():
        results = json.loads(args.out.read_text(encoding="utf-8"))
    with LLM(args.model, max_model_len=2048, max_num_seqs=48) as llm:
        for name in args.parts.split(","):
            if name in parts:
                results[name] = parts[name](llm)
                print(json.dumps({name: results[name]}, indent=1, ensure_ascii=False), flush=True)
        results["device"] = {
            "dtype": llm.info["dtype"],
            "threads": llm.info["threads"],
            "isa": llm.info["device"]["isa"],
        }
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
