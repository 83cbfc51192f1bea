"""XLA's CPU backend has hung where many FFTs ran at once (PyAutoFit issue 1530)."""

import subprocess
import sys

import pytest

SECONDS = 120
COMMON = """
import jax, jax.numpy as jnp, numpy as np
from concurrent.futures import ThreadPoolExecutor
from jax_models import ops

v = jnp.asarray(np.random.default_rng(0).standard_normal((12, 2, 64, 2048)), jnp.float32)
h = jnp.asarray(np.random.default_rng(1).standard_normal((12, 64, 2048)), jnp.float32)
one = jax.jit(ops.long_conv)
expected = [np.asarray(one(*pair)) for pair in zip(v, h)]

def check(results):
    for y, like in zip(results, expected, strict=True):
        np.testing.assert_allclose(y, like, rtol=1e-3, atol=1e-2)
"""
PROGRAMS = {
    "12 in one program": """
all_at_once = jax.jit(lambda v, h: [ops.long_conv(*pair) for pair in zip(v, h)])
for _ in range(5):
    check(all_at_once(v, h))
""",
    "from 12 threads": """
with ThreadPoolExecutor(12) as pool:
    for _ in range(5):
        check(pool.map(lambda i: np.asarray(one(v[i], h[i])), range(12)))
""",
    "20 dispatched at once": """
for _ in range(5):
    ys = [one(v[i % 12], h[i % 12]) for i in range(20)]
    check(ys[:12])
    jax.block_until_ready(ys)
""",
}


@pytest.mark.optimized
@pytest.mark.parametrize("name", PROGRAMS)
def test_long_convolutions_at_once_do_not_hang(name):
    """In a process of its own: one that hangs cannot be interrupted."""
    code = COMMON + PROGRAMS[name]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)
