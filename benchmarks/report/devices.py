"""Lists the records of each device."""

import json
from collections import defaultdict
from pathlib import Path

from benchmarks.report.store import Record

Device = tuple[str, str]
"""A platform, and JAX's name of the device."""


def devices(folder: Path, records: list[Record]) -> str:
    """A table with a row for each device: the parity report and the families of benchmarks."""
    found: defaultdict[Device, list[str]] = defaultdict(list)
    for file in sorted(folder.glob("parity-*.json")):
        device, text = _parity(file)
        found[device].append(text)
    families: defaultdict[Device, set[str]] = defaultdict(set)
    for record in records:
        device = record.platform, str(record.measured_with.get("device", "unknown"))
        families[device].add(record.family)
    for device, names in families.items():
        number = f"{len(names)} famil{'y' if len(names) == 1 else 'ies'}"
        found[device].append(f"{number} of benchmarks")
    lines = ["## Devices\n", "| platform | device | records |", "|---|---|---|"]
    lines += [f"| {' | '.join(device)} | {', '.join(found[device])} |" for device in sorted(found)]
    return "\n".join(lines) + "\n"


def _parity(file: Path) -> tuple[Device, str]:
    """The device of a record of `python -m parity_tests --json`, and how many pairs agree."""
    fields = json.loads(file.read_text(encoding="utf-8"))
    (platform,) = (name for name, state in fields["platforms"].items() if state == "ran")
    failing = {m["case"] for m in fields["measurements"] if m["verdict"] != "pass"}
    failing |= {
        case
        for case in fields["cases"]
        if any(fault.startswith(f"{case}, {platform}: ") for fault in fields["faults"])
    }
    total = len(fields["cases"])
    unfinished = ", unfinished" if fields["done"] else ""
    text = f"[parity: {total - len(failing)} of {total} pairs agree{unfinished}]({file.name})"
    return (platform, fields["versions"]["device"]), text
