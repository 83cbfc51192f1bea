"""The pytest plugin: the mark `parity`, `--parity-json` and `--parity-html`.

A test's reports are attached to pytest's own report of the test, which pytest-xdist sends from its
workers to the controller. The plugin itself imports neither JAX nor torch.
"""

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from parity_tests.engine.report_hooks import REPORT_HOOKS
from twinscan.files import check_writable, write_whole

if TYPE_CHECKING:
    from parity_tests.engine.verdict.report import Report

ATTRIBUTE = "twinscan_record"
"""The attribute of pytest's report that holds the record of a test's comparisons, as JSON."""
COUNT = pytest.StashKey[int]()
"""The number of comparisons that a test has made so far."""
FORMS = {"json": "JSON", "html": "a page"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options `--parity-json` and `--parity-html`."""
    group = parser.getgroup("parity", "parity of JAX with PyTorch (twinscan)")
    for form, what in FORMS.items():
        group.addoption(
            f"--parity-{form}",
            metavar="FILE",
            help=f"write every report of `assert_parity` and `compare` to FILE as {what}",
        )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark and, if files are requested, the collector of reports."""
    config.addinivalue_line("markers", "parity: compares a JAX port with its torch module")
    files = {form: Path(name) for form in FORMS if (name := config.getoption(f"parity_{form}"))}
    is_worker = hasattr(config, "workerinput")  # set in the workers of pytest-xdist
    for form, path in files.items() if not is_worker else ():
        try:
            check_writable(path)
        except OSError as error:
            raise pytest.UsageError(f"--parity-{form}: {path}: {error.strerror}") from None
    if files:
        config.pluginmanager.register(Collector({} if is_worker else files), "twinscan-collector")


class Collector:
    """Collects the reports of a session and writes them at its end; a worker writes no files."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self.reports: list[Report] = []
        """The reports of the running phase of a test."""
        self.records: list[str] = []
        """The records of all tests so far, as JSON."""

    def pytest_sessionstart(self) -> None:
        """Receives all reports from now on."""
        REPORT_HOOKS.append(self.reports.append)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Discards the reports of comparisons outside of tests."""
        self.reports.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attaches the reports to pytest's report under the test's name, and a number from 2 on."""
        report = yield
        if self.reports:
            from parity_tests.report.save import record_of

            first = item.stash.get(COUNT, 0) + 1
            item.stash[COUNT] = first + len(self.reports) - 1
            named = {
                item.nodeid if i == 1 else f"{item.nodeid} ({i})": each
                for i, each in enumerate(self.reports, first)
            }
            setattr(report, ATTRIBUTE, record_of(named).to_json())
            self.reports.clear()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps a test's record, whether it comes from this process or from a worker."""
        if self.files and hasattr(report, ATTRIBUTE):
            self.records.append(getattr(report, ATTRIBUTE))

    def pytest_sessionfinish(self) -> None:
        """Writes the files, and receives no more reports."""
        REPORT_HOOKS.remove(self.reports.append)
        if self.files:
            from parity_tests.report.files import FORMS
            from parity_tests.report.record import Record, join_records

            record = join_records([*map(Record.from_json, self.records)])
            for form, path in self.files.items():
                write_whole(path, FORMS[f".{form}"](record))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Names the files that were written."""
        for path in self.files.values():
            terminalreporter.write_sep("-", f"parity: {path}")
