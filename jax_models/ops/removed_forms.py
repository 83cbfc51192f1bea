"""The forms of operators that were removed, and what to pass instead."""

REMOVED_FORMS: list[tuple[str, str, str]] = [
    (
        "recurrence recurrent_stack",
        "hoisted joined",
        "there is one form of the loop, which is faster than both",
    ),
    (
        "delta_rule gated_delta_rule",
        "pallas pallas_interpreted",
        '"auto" never chose these kernels, and no device has timed them',
    ),
    (
        "linear_recurrence",
        "chunked pallas_interpreted",
        '"auto" never chose these forms; "definition" is a plain lax.scan',
    ),
    (
        "wkv",
        "pallas_interpreted",
        '"auto" never chose this form; "definition" is a plain lax.scan',
    ),
]
"""Operators, the forms that earlier versions had, and why a call should leave `method` out.

docs/migration.md says the same.
"""


def advice_for_removed(operator: str, method: object) -> str:
    """What to do instead of naming a form that was removed, or "" if there never was one."""
    for operators, forms, reason in REMOVED_FORMS:
        if operator in operators.split() and method in forms.split():
            return f", which was removed: leave method out: {reason}"
    return ""
