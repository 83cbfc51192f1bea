"""`python -m benchmarks.recurrences`: the linear recurrence and RWKV's average against their peers.

Forward, and forward with backward, on the same random float32 inputs. The errors are those of the
output and of the gradients (the largest of them), against plain loops in float64.
"""

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.interleave import Measured, Prepared, measure

SHAPES = {
    "linear recurrence": [(4, 2048, 1024), (1, 32768, 256), (1, 65536, 256), (32, 128, 192)],
    "wkv": [(8, 512, 512), (1, 4096, 768)],
}
CONTENDERS = {
    "linear recurrence": [
        ("jax", "twinscan"),
        ("jax", "twinscan associative"),
        ("jax", "twinscan chunked"),
        ("jax", "recurrentgemma"),
        ("jax", "lax.associative_scan"),
        ("torch", "torch loop"),
    ],
    "wkv": [
        ("jax", "twinscan"),
        ("jax", "twinscan associative"),
        ("jax", "lax.scan"),
        ("torch", "transformers"),
        ("torch", "torch loop"),
    ],
}


def inputs(problem: str, shape: tuple[int, int, int]) -> list[np.ndarray]:
    """The operator's arguments and the gradient of its output, float32."""
    rng = np.random.default_rng(0)
    normal = [np.float32(rng.standard_normal(shape)) for _ in range(3)]
    if problem == "linear recurrence":
        return [np.float32(rng.uniform(0.9, 0.999, shape)), *normal[:2]]
    w, u = rng.uniform(0.01, 2, shape[2]), rng.standard_normal(shape[2])
    return [*normal[:2], np.float32(w), np.float32(u), normal[2]]


def oracle(problem: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The output and the gradients of all arguments in float64, by a loop over the steps."""
    *arguments, cotangent = (np.float64(x) for x in arrays)
    return (
        _linear_oracle(*arguments, cotangent)
        if problem != "wkv"
        else _wkv_oracle(*arguments, cotangent)
    )


def _linear_oracle(a, b, cotangent):
    h, g = np.empty_like(b), np.empty_like(b)
    last = carried = np.zeros_like(b[:, 0])
    for t in range(b.shape[1]):
        last = h[:, t] = a[:, t] * last + b[:, t]
    for t in reversed(range(b.shape[1])):
        g[:, t] = cotangent[:, t] + carried
        carried = a[:, t] * g[:, t]
    before = np.concatenate([np.zeros_like(h[:, :1]), h[:, :-1]], axis=1)
    return [h, g * before, g]


def _wkv_oracle(k, v, w, u, cotangent):
    """The printed formula's sums, whose exponents are small enough here for float64."""
    decay, weight, bonus = np.exp(-w), np.exp(k), np.exp(u + k)
    num, den = np.zeros_like(v), np.zeros_like(v)
    for t in range(1, v.shape[1]):
        num[:, t] = decay * num[:, t - 1] + weight[:, t - 1] * v[:, t - 1]
        den[:, t] = decay * den[:, t - 1] + weight[:, t - 1]
    y = (num + bonus * v) / (den + bonus)
    of_num = cotangent / (den + bonus)
    of_den = -of_num * y
    after_num, after_den = np.zeros_like(v), np.zeros_like(v)
    for t in reversed(range(v.shape[1] - 1)):
        after_num[:, t] = decay * after_num[:, t + 1] + of_num[:, t + 1]
        after_den[:, t] = decay * after_den[:, t + 1] + of_den[:, t + 1]
    of_bonus = bonus * (of_num * v + of_den)
    return [
        y,
        of_bonus + weight * (after_num * v + after_den),
        bonus * of_num + weight * after_num,
        -(decay * (after_num * num + after_den * den)).sum(axis=(0, 1)),
        of_bonus.sum(axis=(0, 1)),
    ]


def prepare(name: str, problem: str, shape: tuple[int, int, int], backward: bool) -> Prepared:
    """A contender by name, in its own process."""
    arrays = inputs(problem, shape)
    if name in ("torch loop", "transformers"):
        return _prepare_torch(name, problem, arrays, backward)
    return _prepare_jax(name, problem, arrays, backward)


def _prepare_jax(name: str, problem: str, arrays, backward: bool) -> Prepared:
    import jax

    function = _jax_wkv(name) if problem == "wkv" else _jax_linear(name)

    def call(*arguments):
        if not backward:
            return [function(*arguments[:-1])]
        y, pullback = jax.vjp(function, *arguments[:-1])
        return [y, *pullback(arguments[-1])]

    arguments = [jax.device_put(x) for x in arrays]
    start = time.perf_counter()
    compiled = jax.jit(call).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    parts = ("argument", "output", "temp")
    return Prepared(
        run=lambda: jax.block_until_ready(compiled(*arguments)),
        result=lambda: [np.asarray(x) for x in compiled(*arguments)],
        compile_s=seconds,
        memory=sum(getattr(memory, f"{part}_size_in_bytes") for part in parts),
    )


def _jax_linear(name: str):
    import jax

    from jax_models.ops import linear_recurrence

    if name == "recurrentgemma":
        import typeguard  # pyright: ignore[reportMissingImports]

        typeguard.typechecked = lambda f: f  # its annotations fail under typeguard 4
        from recurrentgemma.jax.scan import (  # pyright: ignore[reportMissingImports]
            linear_scan,
        )

        return lambda a, b: linear_scan(b, a)[0]
    if name == "lax.associative_scan":

        def combine(first, second):
            return first[0] * second[0], second[0] * first[1] + second[1]

        return lambda a, b: jax.lax.associative_scan(combine, (a, b), axis=1)[1]
    method = name.removeprefix("twinscan").strip() or "auto"
    return lambda a, b: linear_recurrence(a, b, method=method)[0]  # pyright: ignore[reportArgumentType]


def _jax_wkv(name: str):
    import jax
    import jax.numpy as jnp

    from jax_models.ops import wkv

    def plain_scan(k, v, w, u):
        def step(state, inputs):
            (num, den, max), (k, v) = state, inputs
            q = jnp.maximum(max, u + k)
            past, now = jnp.exp(max - q), jnp.exp(u + k - q)
            y = (past * num + now * v) / (past * den + now)
            q = jnp.maximum(max - w, k)
            past, now = jnp.exp(max - w - q), jnp.exp(k - q)
            return (past * num + now * v, past * den + now, q), y

        zeros = jnp.zeros_like(k[:, 0])
        by_step = (jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0))
        return jnp.moveaxis(jax.lax.scan(step, (zeros, zeros, zeros - 1e38), by_step)[1], 0, 1)

    if name == "lax.scan":
        return plain_scan
    method = name.removeprefix("twinscan").strip() or "auto"
    return lambda k, v, w, u: wkv(k, v, w=w, u=u, method=method)[0]  # pyright: ignore[reportArgumentType]


def _prepare_torch(name: str, problem: str, arrays, backward: bool) -> Prepared:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    *arguments, cotangent = (torch.from_numpy(x) for x in arrays)
    if name == "transformers":
        from transformers.models.rwkv.modeling_rwkv import (  # pyright: ignore[reportMissingImports]
            rwkv_linear_attention_cpu,
        )

        def function(k, v, w, u):
            return rwkv_linear_attention_cpu(w.log(), u, k, v)[0]
    else:
        function = _torch_wkv if problem == "wkv" else _torch_linear

    def call():
        if not backward:
            with torch.no_grad():
                return [function(*arguments)]
        leaves = [x.detach().requires_grad_() for x in arguments]
        y = function(*leaves)
        y.backward(cotangent)
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    return Prepared(call, lambda: [x.numpy() for x in call()], compile_s=None, memory=None)


def _torch_linear(a, b):
    import torch

    h, hs = torch.zeros_like(b[:, 0]), []
    for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
        h = a_t * h + b_t
        hs.append(h)
    return torch.stack(hs, dim=1)


def _torch_wkv(k, v, w, u):
    import torch

    num = den = torch.zeros_like(k[:, 0])
    max = torch.full_like(num, -1e38)
    ys = []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        q = torch.maximum(max, u + k_t)
        past, now = torch.exp(max - q), torch.exp(u + k_t - q)
        ys.append((past * num + now * v_t) / (past * den + now))
        q = torch.maximum(max - w, k_t)
        past, now = torch.exp(max - w - q), torch.exp(k_t - q)
        num, den, max = past * num + now * v_t, past * den + now, q
    return torch.stack(ys, dim=1)


def table(title: str, rows: list[tuple[Measured, Measured]], size: int) -> Table:
    """The contenders of one problem, ours first; ratios are ours over theirs."""
    result = Table(title=title, title_justify="left")
    for column in (
        "",
        "fwd ms",
        "ours/",
        "fwd+bwd ms",
        "ours/",
        "compile s",
        "memory",
        "error",
        "of gradients",
    ):
        result.add_column(column, justify="left" if not column else "right")
    ours = rows[0]
    for forward, both in rows:
        result.add_row(
            forward.name,
            f"{forward.ms:.2f}",
            f"{ours[0].ms / forward.ms:.2f}",
            f"{both.ms:.2f}",
            f"{ours[1].ms / both.ms:.2f}",
            "–" if both.compile_s is None else f"{both.compile_s:.1f}",
            "–" if both.memory is None else f"{both.memory / size:.1f} ×",
            f"{both.errors[0]:.0e}",
            f"{max(both.errors[1:]):.0e}",
        )
    return result


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recurrences", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--only", choices=list(SHAPES), help="one of the two problems")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("B", "T", "D"), help="one shape")
    options = parser.parse_args()
    console = Console(width=120)
    figures = []
    for problem in [options.only] if options.only else SHAPES:
        for shape in [tuple(options.shape)] if options.shape else SHAPES[problem]:
            arrays = inputs(problem, shape)
            expected = oracle(problem, arrays)
            measured = [
                measure(
                    "benchmarks.recurrences", CONTENDERS[problem], (problem, shape, backward), want
                )
                for backward, want in ((False, expected[:1]), (True, expected))
            ]
            rows = list(zip(*measured, strict=True))
            size = sum(x.nbytes for x in arrays[:-1])
            title = f"{problem}, batch {shape[0]}, time {shape[1]}, features {shape[2]}"
            console.print(table(title, rows, size))
            figures += [
                {"problem": problem, "shape": shape, "name": f.name, "forward_ms": f.ms}
                | {"both_ms": b.ms, "compile_s": b.compile_s, "errors": b.errors}
                | {"memory_over_inputs": b.memory and b.memory / size}
                for f, b in rows
            ]
    if options.json:
        packages = ("jax", "torch", "recurrentgemma", "transformers")
        about = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
        about |= {package: version(package) for package in packages}
        options.json.write_text(json.dumps({"with": about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
