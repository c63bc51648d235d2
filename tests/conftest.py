"""Settings of every test run."""

import os

# The reference executor's matrix products: BLAS threads that spin for each other cost more than they give wherever a
# core is shared. Must be set before NumPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
