"""How far logits are off, in the units of language models."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
from scipy.special import log_softmax

from parity_tests.engine.results import GROUPS, Results, only_floating

TOP = 5
BLOCK = 2**22
"""The number of logits that are converted to float64 at a time, to save memory."""


@dataclasses.dataclass(frozen=True)
class LogitsError:
    """How far the next token's distribution is from the float64 torch side's.

    p are the probabilities over the last axis on the float64 torch side, and q those on the side
    that is measured. Each field is the mean or the maximum of a quantity over all tokens.
    """

    kl_mean: float
    """KL(p ‖ q), in nats."""
    kl_max: float
    log_prob_mean: float
    """The largest |log p − log q| over the vocabulary."""
    log_prob_max: float
    top_1: float
    """How often the likeliest next token under p is also the likeliest under q."""
    top_k: float
    """The share of the `TOP` likeliest next tokens under p that are also among those under q."""


def checked_logits(logits: str | bool) -> str | bool:
    """Checks the type of `logits`."""
    if not isinstance(logits, str | bool):
        raise TypeError(f"logits: expected True, False or a name, got {logits!r}")
    return logits


def logits_array(logits: str | bool, results: Results) -> tuple[str, str]:
    """The group and the name of the logits; True means the only floating array of the outputs."""
    named = {
        name: group
        for group in (GROUPS[:1] if logits is True else GROUPS[:2])
        for name, array in only_floating(results.get(group, {})).items()
        if array.ndim
    }
    name = next(iter(named), "") if logits is True and len(named) == 1 else logits
    if not isinstance(name, str) or name not in named:
        given = f"True, for {len(named)} outputs" if logits is True else repr(logits)
        raise ValueError(f"logits: expected one of {', '.join(named) or 'none'}, got {given}")
    return named[name], name


def logits_error(logits: np.ndarray, oracle: np.ndarray) -> LogitsError:
    """How far logits (…, vocabulary) are from the oracle's, in float64."""
    vocabulary = oracle.shape[-1]
    rows = max(BLOCK // vocabulary, 1)
    expected, actual = (a.reshape(-1, vocabulary) for a in (oracle, logits))
    blocks = [
        _by_token(actual[i : i + rows].astype(np.float64), expected[i : i + rows])
        for i in range(0, len(expected), rows)
    ]
    kl, log_prob, top_1, top_k = np.concatenate(blocks, axis=1)
    numbers = kl.mean(), kl.max(), log_prob.mean(), log_prob.max(), top_1.mean(), top_k.mean()
    return LogitsError(*map(float, numbers))


def _by_token(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """KL, the largest |Δ log p|, and both agreements of each token, of shape (4, tokens)."""
    log_p, log_q = log_softmax(expected, -1), log_softmax(actual, -1)
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.where(log_p == log_q, 0.0, log_p - log_q)  # −∞ on both sides is equal
        # Σ p·off, without its cancellation: p and q both sum to one
        terms = np.where(np.exp(log_p) > 0, np.exp(log_p) * (np.expm1(-off) + off), np.exp(log_q))
    kl = np.where(np.isnan(off).any(-1), np.nan, terms.sum(-1))
    top_1, top_k = (_agreement(actual, expected, k) for k in (1, TOP))
    return np.stack([kl, abs(off).max(-1), top_1, top_k])


def _agreement(actual: np.ndarray, expected: np.ndarray, k: int) -> np.ndarray:
    """The share of the k likeliest expected tokens that are also among the k likeliest, or tied."""
    k = min(k, expected.shape[-1])
    largest = np.argpartition(-expected, k - 1, axis=-1)[:, :k]
    least = -np.partition(-actual, k - 1, axis=-1)[:, k - 1, None]
    return (np.take_along_axis(actual, largest, axis=-1) >= least).mean(-1)


COLUMNS = {
    "KL mean": ("kl_mean", ".1e"),
    "KL max": ("kl_max", ".1e"),
    "|Δ log p| mean": ("log_prob_mean", ".1e"),
    "|Δ log p| max": ("log_prob_max", ".1e"),
    "top-1": ("top_1", ".2%"),
    f"top-{TOP}": ("top_k", ".2%"),
}
"""The columns of a table of `LogitsError`s: the field that a column shows, and its format."""


def logits_lines(logits: Mapping[str, Mapping[str, LogitsError]]) -> Iterator[str]:
    """The lines of a table of the errors by dtype and side; none if there are no errors."""
    if logits:
        yield f"\n{'logits':15}" + "".join(f"{column:>16}" for column in COLUMNS)
    for dtype, sides in logits.items():
        for side, error in sides.items():
            cells = (f"{getattr(error, name):{form}}" for name, form in COLUMNS.values())
            yield f"{dtype:9}{side:6}" + "".join(f"{cell:>16}" for cell in cells)
