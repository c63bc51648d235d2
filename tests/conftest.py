"""Settings of every test run."""

import os

from hypothesis import settings

# The reference executor's matrix products: BLAS threads that spin for each other cost more than they give wherever a
# core is shared. Must be set before NumPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Tests are never timed: a deadline of hypothesis fails where another process has the core.
settings.register_profile("pinnate", deadline=None)
settings.load_profile("pinnate")
