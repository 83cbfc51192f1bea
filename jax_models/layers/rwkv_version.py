"""The versions of RWKV, recognized by the keys of their checkpoints."""

from collections.abc import Callable, Iterable

MARKS = {
    "a file converted by the rwkv package": ("_strategy", "_rescale_layer"),
    "RWKV-8": ("enn.weight",),
    "RWKV-7b": ("qkv.qq.weight", "qkv.k_emb.weight", "qkv.v_emb.weight", "k_emb_x", "v_emb_x"),
    "RWKV-7a": ("s_emb.weight", "s_emb_x.weight", "s0", "s1", "s2"),
    "RWKV-7": ("r_k",),
    "an early RWKV-7": ("time_aaaaa", "time_misc_kkk", "xx_r", "ww_b", "kk_s", "rk_s", "x_r"),
    "RWKV-6a": ("gate_w1",),
    "RWKV-6": ("time_maa_x", "x_proj.0.mu"),
    "RWKV-5": ("ln_x.weight", "time_faaaa", "gate.weight"),
    "RWKV-4": ("time_mix_k", "time_mix_key"),
}
"""For each version of RWKV, ends of keys by which to recognize it. The order matters, because keys
of a version may also occur in versions that are listed before it.
"""


def rwkv_version(keys: Iterable[object]) -> tuple[str, str] | None:
    """Returns the version of RWKV that has these keys, and the key that identifies it, or None."""
    names = [str(key) for key in keys]
    for version, marks in MARKS.items():
        if key := _first(names, marks):
            gate = _first(names, ("mlp.gate_proj.weight",))
            return ("a hybrid of an RWKV and a transformer", gate) if gate else (version, key)
    return None


def _first(keys: Iterable[str], marks: Iterable[str]) -> str | None:
    return next((k for k in keys if any(f".{k}".endswith(f".{mark}") for mark in marks)), None)


def describe_other_version(keys: Iterable[object], version: str) -> str | None:
    """Describes the other version with these keys, such as `RWKV-5 (it has …)`, or returns None."""
    found, key = rwkv_version(keys) or (version, "")
    return None if found == version else f"{found} (it has {key})"


def foreign_to(version: str) -> Callable[[Iterable[object]], str | None]:
    """Returns a layer's `foreign_format`, which describes the other version that has the keys."""

    def foreign_format(keys: Iterable[object]) -> str | None:
        other = describe_other_version(keys, version)
        return other and f"a checkpoint of {other}, this model is {version}"

    return foreign_format
