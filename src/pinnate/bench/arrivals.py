"""When requests are sent. Pure."""

from __future__ import annotations

import itertools
import math
import random


def arrival_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds after the start, ascending, the first at 0.

    Gaps are gamma distributed with mean 1 / `rate` and shape `burstiness`: 1 is a Poisson process, less is burstier,
    more is steadier. An infinite `rate` sends everything at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = (rng.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))[:count]
