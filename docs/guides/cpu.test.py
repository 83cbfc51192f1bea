"""Where the kernels are not installed, XLA takes their place, so that the page shows a choice."""

import importlib.util

from jax_models.ops import forms
from jax_models.ops.gated.stack import run_xla

if importlib.util.find_spec("twinscan_native") is None:
    native = forms.Form("native", run_xla, ("cpu",))
    forms._packages = lambda: [("twinscan-native", {"recurrent_stack": (native,)})]
