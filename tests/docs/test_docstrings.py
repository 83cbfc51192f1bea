"""The examples in the docstrings of public classes and functions run."""

import doctest
import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_models

COMPUTED = {
    "Constant", "from_torch", "from_weights", "generate", "keras_table", "load_pretrained",
    "onnx_table", "project", "read_pth", "stream", "to_torch", "undo_rescale",
}  # fmt: skip
"""Examples that need values. The others are only traced, which gives shapes without compiling."""
NEEDED = {"from_keras": "keras", "from_onnx": "onnx"}
"""Examples that need another package, and values."""
NO_EXAMPLE = {"tune_allocator"}
"""Functions without an example, because it would change the process that runs the tests."""


def needs_example(name):
    """Whether a name needs an example. Layers show their states, models their configs."""
    shown = getattr(jax_models, name)
    is_state = hasattr(shown, "_fields")
    return name not in NO_EXAMPLE and not is_state and not name.endswith("Config")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*filter(needs_example, jax_models.__all__)])
def test_example(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    public = {each: getattr(jax_models, each) for each in jax_models.__all__}
    docstring = inspect.cleandoc(getattr(jax_models, name).__doc__)
    lines = docstring.splitlines()
    assert lines[0].endswith(".")
    assert lines[2].lstrip().startswith(">>> ")
    example = doctest.DocTestParser().get_doctest(
        docstring, {"jax": jax, "jnp": jnp, "nnx": nnx, **public}, name, None, None
    )
    report = []

    def run():
        doctest.DocTestRunner().run(example, out=report.append)

    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
        # Keras does not work with strict promotion.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            run()
    elif name in COMPUTED:
        run()
    else:
        jax.eval_shape(run)
    assert not report, "".join(report)
