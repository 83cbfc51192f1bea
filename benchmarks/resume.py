"""Stores the measurements of an unfinished run, so that the same command can continue it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.outcome import Outcome
from benchmarks.report.store import outcome_fields, outcome_from
from twinscan.files import write_whole

FILE = "unfinished.json"


class OutOfTime(Exception):  # noqa: N818
    """Raised if the next piece would take longer than the time that is left."""


class ResumableRun:
    """The pieces of a run in a folder, at least one of which is measured in each call.

    Args:
        folder: the folder of the results.
        minutes: the time after which the run stops.
        run: describes what is measured and on what; the pieces of a different run are discarded.

    """

    def __init__(self, folder: Path, minutes: float, run: Any) -> None:
        self.path, self.deadline = folder / FILE, time.monotonic() + 60 * minutes
        self.measured = 0
        self.fields = {"run": run, "longest": 0.0, "families": [], "pieces": {}}
        if self.path.exists():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            self.fields = found if found["run"] == run else self.fields

    def measure_once(self, name: str, measure: Callable[[], Outcome]) -> Outcome:
        """Returns the stored measurement of a piece, or measures and stores it.

        Raises:
            OutOfTime: less time is left than the longest piece so far has taken.

        """
        if name not in self.fields["pieces"]:
            start = time.monotonic()
            if self.measured and start + self.fields["longest"] > self.deadline:
                raise OutOfTime
            self.fields["pieces"][name] = outcome_fields(measure())
            self.fields["longest"] = max(self.fields["longest"], time.monotonic() - start)
            self.measured += 1
            self._write()
        return outcome_from(self.fields["pieces"][name])

    def is_written(self, family: str) -> bool:
        """Whether the record of a family is written."""
        return family in self.fields["families"]

    def mark_written(self, family: str) -> None:
        """Remembers that the record of a family is written."""
        self.fields["families"].append(family)
        self._write()

    def _write(self) -> None:
        write_whole(self.path, json.dumps(self.fields) + "\n")

    def remove(self) -> None:
        """Removes the pieces of a finished run."""
        self.path.unlink(missing_ok=True)
