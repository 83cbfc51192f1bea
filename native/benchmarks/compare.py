"""Times the kernels and torch.nn on the same recurrent layers, and compares their rounding errors.

    python native/benchmarks/compare.py [--library FILE] [--runs N] [lstm:300x16x520 …]

A problem is a cell and steps x rows x units, with as many inputs as units. Our times include XLA's
product with the inputs before the kernel, and the weights' gradient after it. A ratio below 1 means
that ours is faster. An error is the largest distance from torch's float64 result.
"""

import argparse
import ctypes
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
PROBLEMS = """lstm:90x24x400 lstm:300x16x520 lstm:60x32x640 lstm:128x32x256 lstm:400x1x320
    gru:200x32x300 gru:60x16x640 rnn:200x32x160 bilstm:150x16x200 lstm:100x256x64 lstm:50x64x1024
    lstm:200x8x128 lstm:100x4x768 gru:100x128x96 gru:300x1x512 rnn:100x64x512 rnn:150x16x256
    bilstm:80x48x300 bigru:120x24x256"""


def register(library: str) -> None:
    """Makes the kernels of a shared library known to JAX."""
    symbols = ctypes.CDLL(library)
    for cell in GATES:
        for kernel in (f"twinscan_{cell}_forward", f"twinscan_{cell}_backward"):
            capsule = jax.ffi.pycapsule(getattr(symbols, kernel))
            jax.ffi.register_ffi_target(kernel, capsule, platform="cpu")


def layer(cell: str, directions: int):
    """Returns a differentiable function of weights and inputs, which starts from zeros."""
    gates, reverse = GATES[cell], {"reverse": np.int64(directions - 1 << 1)}
    relu = {"relu": False} if cell == "rnn" else {}

    def call(name, shapes, arguments, **attributes):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return jax.ffi.ffi_call(name, shapes)(*arguments, **attributes, **reverse, **relu)

    def masks(x):
        (b, t, _) = x.shape
        return jnp.full(b, t, jnp.int32), jnp.zeros((directions, b, 0), bool)

    def forward(weights, x, keep):
        w_x, bias, kernel, bias_hn = weights
        (b, t, _), h = x.shape, kernel.shape[1]
        state = jnp.zeros((directions, b, h))
        outputs, all_gates = (b, t, directions * h), (b, t, directions * gates * h)
        extra = {"lstm": [state], "gru": [], "rnn": []}[cell]
        shapes = [outputs] + [state.shape] * (1 + len(extra))
        if cell != "rnn":
            shapes += [all_gates, outputs] if keep else [(0,), (0,)]
        bias = bias.reshape(directions, -1)
        arguments = [x @ w_x, bias, kernel, *([bias_hn] if cell == "gru" else []), state, *extra]
        return call(f"twinscan_{cell}_forward", shapes, [*arguments, *masks(x)], keep=keep)

    @jax.custom_vjp
    def run(weights, x):
        return forward(weights, x, False)[0]

    def run_forward(weights, x):
        y, *rest = forward(weights, x, True)
        return y, (weights, x, y, rest[2 if cell == "lstm" else 1 :])

    def run_backward(saved, dy):
        (w_x, _, kernel, _), x, y, residuals = saved
        (b, t, _), h = x.shape, kernel.shape[1]
        states = [jnp.zeros((directions, b, h))] * (2 if cell == "lstm" else 1)
        shapes = [(b, t, directions * gates * h)] + [states[0].shape] * len(states)
        shapes += [y.shape] if cell == "gru" else []
        arguments = [dy, *states, kernel, y, *states, *residuals, *masks(x)]
        dx_sums, *rest = call(f"twinscan_{cell}_backward", shapes, arguments)
        d_sums, dbias_hn = dx_sums.reshape(b, t, directions, gates, h), jnp.zeros((directions, h))
        if cell == "gru":
            dn_h = rest[1].reshape(b, t, directions, h)
            d_sums, dbias_hn = d_sums.at[:, :, :, 2].set(dn_h), dn_h.sum((0, 1))
        before = [jnp.pad(y[:, :-1, :h], ((0, 0), (1, 0), (0, 0)))]
        before += [jnp.pad(y[:, 1:, h:], ((0, 0), (0, 1), (0, 0)))] * (directions - 1)
        by_direction = [d_sums[:, :, d].reshape(b, t, -1) for d in range(directions)]
        products = [
            jnp.einsum("bth,btg->hg", *pair) for pair in zip(before, by_direction, strict=True)
        ]
        dw_x = jnp.einsum("bti,btg->ig", x, dx_sums)
        return (dw_x, dx_sums.sum((0, 1)), jnp.stack(products), dbias_hn), dx_sums @ w_x.T

    run.defvjp(run_forward, run_backward)
    return run


def ported(module, cell: str, directions: int):
    """Returns the weights of a torch module as the layer takes them."""

    def stack(name):
        names = [name + suffix for suffix in ("", "_reverse")[:directions]]
        return [getattr(module, name).detach().numpy() for name in names]

    h = module.hidden_size
    bias, hidden_bias = np.stack(stack("bias_ih_l0")), np.stack(stack("bias_hh_l0"))
    bias_hn = hidden_bias[:, -h:].copy()
    if cell == "gru":
        hidden_bias[:, -h:] = 0
    w_x = np.concatenate(stack("weight_ih_l0")).T
    kernel = np.stack(stack("weight_hh_l0")).swapaxes(1, 2)
    return jax.tree.map(jnp.asarray, (w_x, (bias + hidden_bias).ravel(), kernel, bias_hn))


def compare(problem: str, runs: int) -> str:
    """Returns a line with the ratios of the times and the errors of both sides."""
    name, sizes = problem.split(":")
    cell, directions = name.removeprefix("bi"), 1 + name.startswith("bi")
    t, b, h = map(int, sizes.split("x"))
    torch.manual_seed(0)
    module = getattr(torch.nn, cell.upper())(h, h, batch_first=True, bidirectional=directions == 2)
    x, dy = torch.randn(b, t, h), torch.randn(b, t, directions * h)
    weights, ours = ported(module, cell, directions), layer(cell, directions)
    ours_x, ours_dy = jnp.asarray(x.numpy()), jnp.asarray(dy.numpy())
    forward = jax.jit(ours)
    both = jax.jit(lambda w, x, dy: (lambda y, vjp: (y, vjp(dy)))(*jax.vjp(ours, w, x)))

    def torch_both(module=module, x=x, dy=dy):
        module.zero_grad()
        x = x.detach().requires_grad_()
        y = module(x)[0]
        y.backward(dy)
        gradients = [p.grad for n, p in module.named_parameters() if "weight_hh" in n]
        return [a.detach().double().numpy() for a in (y, x.grad, torch.stack(gradients).mT)]

    def torch_forward():
        with torch.no_grad():
            module(x)

    def seconds(function):
        time.sleep(0.02)  # the threads of OpenMP and of XLA still spin for a while after a call
        start = time.perf_counter()
        jax.block_until_ready(function())
        return time.perf_counter() - start

    y, ((_, _, dkernel, _), dx) = both(weights, ours_x, ours_dy)
    theirs = torch_both()
    exact = torch_both(module.double(), x.double(), dy.double())
    module.float()
    errors = [
        [
            np.abs(np.asarray(a) - e).max() / np.abs(e).max()
            for a, e in zip(side, exact, strict=True)
        ]
        for side in ((y, dx, dkernel), theirs)
    ]
    sides = [
        lambda: forward(weights, ours_x),
        torch_forward,
        lambda: both(weights, ours_x, ours_dy),
        torch_both,
    ]
    times = [[seconds(side) for side in sides] for _ in range(runs + 2)][2:]
    medians = [1e3 * statistics.median(column) for column in zip(*times, strict=True)]
    line = f"{problem:18}"
    for name, ours_ms, torch_ms in (("forward", *medians[:2]), ("both", *medians[2:])):
        line += f" {name} {ours_ms:7.2f}/{torch_ms:7.2f} ms = {ours_ms / torch_ms:.2f}  "
    for name, ours_error, torch_error in zip(("y", "dx", "dW"), *errors, strict=True):
        line += f" {name} {ours_error:.1e}/{torch_error:.1e}={ours_error / torch_error:.2f}"
    return line


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("problems", nargs="*", default=PROBLEMS.split())
    parser.add_argument("--library")
    parser.add_argument("--runs", type=int, default=21)
    options = parser.parse_args()
    if options.library is None:
        import twinscan_native

        options.library = twinscan_native.path()
    register(str(options.library))
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    assert torch.get_num_threads() == cores
    print(f"torch on {cores} threads; XLA and the kernels on {cores} cores")
    for problem in options.problems:
        print(compare(problem, options.runs), flush=True)
