"""Programs of SGLang's frontend language on `/generate`: python structured_frontend.py BASE_URL. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang as sgl

COUNT, TENS = "1, 2, 3, 4, 5, 6, 7,", "10, 20, 30, 40, 50, 60,"


@sgl.function
def go_on(s: Any, start: str) -> None:
    s += start + sgl.gen("rest", max_tokens=8, temperature=0)


@sgl.function
def choose(s: Any) -> None:
    s += COUNT + sgl.select("next", choices=[" 3", " 8", " eleven"])


@sgl.function
def branch(s: Any) -> None:
    s += COUNT
    branches = s.fork(2)
    for number, one in enumerate(branches):
        one += sgl.gen("part", max_tokens=4 + number, temperature=0)
    s["short"], s["long"] = branches[0]["part"], branches[1]["part"]


@sgl.function
def constrained(s: Any) -> None:
    s += "Number: " + sgl.gen("number", regex=r"[0-9]{3}", max_tokens=8, temperature=0)
    s += sgl.gen("stopped", max_tokens=16, temperature=0, stop=["\n"])


def main(url: str) -> None:
    sgl.set_default_backend(sgl.RuntimeEndpoint(url))
    run = go_on.run(start=COUNT)
    branched, forced = branch.run(), constrained.run()
    print(
        json.dumps(
            {
                "rest": run["rest"],
                "meta": run.get_meta_info("rest"),
                "batch": [one["rest"] for one in go_on.run_batch([{"start": COUNT}, {"start": TENS}])],
                "stream": list(go_on.run(start=COUNT, stream=True).text_iter()),
                "next": choose.run()["next"],
                "branches": [branched["short"], branched["long"]],
                "number": forced["number"],
                "stopped": forced["stopped"],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
