"""Every test runs with strict dtype promotion and no implicit rank promotion.

What a worker has compiled is not compiled again by it, nor by the processes that its tests start.
"""

import os
import tempfile

programs = tempfile.TemporaryDirectory(prefix="twinscan-tests-", ignore_cleanup_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
