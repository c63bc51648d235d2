"""Settings of every test run."""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# The reference executor's matrix products: BLAS threads that spin for each other cost more than they give wherever a
# core is shared. Must be set before NumPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Tests start 150 processes: compiled modules are kept, or each of them compiles all of pinnate again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests are never timed: a deadline of hypothesis fails where another process has the core.
settings.register_profile("pinnate", deadline=None)
settings.load_profile("pinnate")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting makes a million objects that stay: no garbage is looked for among them, then or in the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
