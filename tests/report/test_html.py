"""The report's page, as text and in a browser."""

import dataclasses
import math
import re
import shutil
from html.parser import HTMLParser

import pytest

from parity_tests.engine.tolerance import Error
from parity_tests.report.html import page
from parity_tests.report.record import (
    ErrorOverTime,
    Measurement,
    MutationResult,
    PrecisionError,
    Record,
)

BROKEN = "</script><b>&quot;"
STEPS = 20
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)


def measurement(case: str, dtype: str, group: str, jax: float, **error) -> Measurement:
    error = {"torch": 2e-8, "bound": 8e-8, "unstable": False, "tensor": "y"} | error
    return Measurement(case, "cpu", dtype, group, Error(jax=jax, **error))


def over_time(case: str, dtype: str) -> ErrorOverTime:
    errors = tuple(1e-7 * (step + 1) for step in range(STEPS))
    return ErrorOverTime(case, "cpu", dtype, errors, (math.nan, 0.0, *errors[2:]))


RECORD = Record(
    {"python": "3.11.7", "jax": "0.10.2"},
    {"cpu": "ran", "gpu": "not on this machine"},
    (
        measurement("LSTM", "float64", "outputs", 9e-13, torch=0.0, bound=1e-12),
        measurement("LSTM", "float32", "outputs", 3e-8),
        measurement("LSTM", "float32", "final state", 1e-7, tensor="state.h"),
        measurement("GRU", "float32", "outputs", 0.05, torch=0.02, bound=0.08, unstable=True),
        measurement(BROKEN, "bfloat16", "outputs", math.nan),
    ),
    ("HyenaBlock, cpu: outputs: all of them are empty",),
    (
        PrecisionError("LSTM", "cpu", "bfloat16", True, "outputs", 3e-3, 1e-7),
        PrecisionError("GRU", "cpu", "bfloat16", False, "outputs", 5e-3, 1e-7),
    ),
    {"LSTM": "lstm", "GRU": "gru", BROKEN: "broken", "HyenaBlock": "hyena"},
    tuple(over_time(case, dtype) for case in ("LSTM", BROKEN) for dtype in ("float32", "bfloat16")),
)


class Parsed(HTMLParser):
    """The elements of a page, and the text in them."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.text = [("", {})], {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        tag, attributes = self.elements[-1]
        key = attributes.get("id", tag)
        self.text[key] = self.text.get(key, "") + data.strip()


def test_a_page_asks_for_nothing():
    parsed = Parsed(page(RECORD))
    links = [
        value
        for _, attributes in parsed.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster")
    ]
    assert links == ["data:,"]
    for code in (parsed.text["style"], parsed.text["script"]):
        assert not re.search(r"@import|url\(|\bfetch\b|XMLHttpRequest|\bimport\b", code)
    assert {tag for tag, _ in parsed.elements}.isdisjoint({"b", "iframe", "object", "embed", "img"})


def test_a_page_holds_its_record():
    parsed = Parsed(page(RECORD))
    assert Record.from_json(parsed.text["record"]) == RECORD
    assert ("html", {"lang": "en"}) in parsed.elements
    rows = [attributes for tag, attributes in parsed.elements if tag == "tr" and attributes]
    entries = [*RECORD.measurements, *RECORD.precision]
    assert [row["data-case"] for row in rows] == [entry.case for entry in entries]


def test_the_verdict_counts_pairs():
    assert Parsed(page(RECORD)).text["h1"] == "1 pair agrees; 3 fail"
    good = Record({}, {"cpu": "ran"}, RECORD.measurements[:2], cases={"LSTM": "lstm", "GRU": "gru"})
    text = page(good)
    assert Parsed(text).text["h1"] == "2 pairs agree; 0 fail"
    assert "Precision of" not in text


def test_planted_faults_are_counted():
    good = Record({}, {"cpu": "ran"}, RECORD.measurements[:2], cases={"LSTM": "lstm"})
    caught = MutationResult("gates swapped", "LSTM", "weights", None, True)
    missed = MutationResult("mask forgotten", "LSTM", "states and masks", "padding", False)
    text = page(dataclasses.replace(good, mutations=(caught,)))
    assert "1 of 1 planted faults caught." in text
    assert '<header class="pass">' in text
    text = page(dataclasses.replace(good, mutations=(caught, missed)))
    assert "1 of 2 planted faults caught." in text
    assert "LSTM: the planted fault “mask forgotten” is not caught by padding" in text
    assert '<header class="fail">' in text


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium or Chrome is installed")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def file(tmp_path):
    """The page."""
    file = tmp_path / "report.html"
    file.write_text(page(RECORD), encoding="utf-8")
    return file


@pytest.fixture
def tab(browser, file):
    """The page in a browser, which must report nothing and ask for nothing but the file."""
    context = browser.new_context(color_scheme="light")
    tab, seen = context.new_page(), []
    tab.on("console", lambda message: seen.append(message.text))
    tab.on("pageerror", lambda error: seen.append(str(error)))
    tab.on("request", lambda request: seen.append(request.url))
    tab.goto(file.as_uri())
    yield tab
    context.close()
    assert [entry for entry in seen if entry != file.as_uri()] == []


def column(tab, number: int) -> list[str]:
    """The shown rows' texts in a column of the table of errors."""
    return tab.locator(f"#measurements tbody tr:visible > :nth-child({number})").all_inner_texts()


def test_a_browser_shows_the_verdict(tab):
    assert tab.locator("h1").inner_text() == "1 pair agrees; 3 fail"
    assert tab.locator(".faults li").all_inner_texts() == list(RECORD.faults)
    assert "gpu not on this machine" in re.sub(r"\s+", " ", tab.locator("header").inner_text())
    assert column(tab, 2) == [
        "✓ pass",
        "✓ pass",
        "✗ FAIL",
        "✓ passunstable reference",
        "✗ FAIL",
    ]
    assert tab.locator("#count").inner_text() == "5 of 5 rows"


def test_a_page_is_read_without_its_script(browser, file):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(file.as_uri())
    assert tab.locator("h1").inner_text() == "1 pair agrees; 3 fail"
    assert len(column(tab, 1)) == 5
    assert not tab.locator("form").is_visible()
    context.close()


def test_a_header_sorts_by_number(tab):
    header = tab.get_by_role("columnheader", name="JAX error")
    assert header.get_attribute("aria-sort") == "none"
    header.get_by_role("button").click()
    errors = ["9.0e-13", "3.0e-08", "1.0e-07", "5.0e-02", "not finite"]
    assert (header.get_attribute("aria-sort"), column(tab, 7)) == ("ascending", errors)
    header.get_by_role("button").press("Enter")
    assert (header.get_attribute("aria-sort"), column(tab, 7)) == ("descending", errors[::-1])
    tab.get_by_role("columnheader", name="Case").first.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "none"
    assert column(tab, 1) == [BROKEN, "GRU", "LSTM", "LSTM", "LSTM"]


def test_what_has_no_ratio_comes_last(tab):
    button = tab.get_by_role("columnheader", name="Ratio").get_by_role("button")
    for _ in range(2):
        button.click()
        assert column(tab, 8)[-1] == "–"


@pytest.mark.parametrize(
    ("label", "value", "count"),
    [
        ("Architecture", "lstm", 3),
        ("Platform", "cpu", 5),
        ("Dtype", "float32", 3),
        ("Check", "final state", 1),
        ("Search", "STATE.h lstm", 1),
        ("Failures only", None, 2),
    ],
)
def test_a_filter_is_kept_in_the_hash(tab, label, value, count):
    field = tab.locator("form").get_by_label(label)
    if value is None:
        field.check()
    elif label == "Search":
        field.fill(value)
    else:
        field.select_option(value)
    assert len(column(tab, 1)) == count
    assert tab.locator("#count").inner_text() == f"{count} of 5 rows"
    places = {(row, "cpu") for row in column(tab, 1)}
    assert tab.locator("figure:visible").count() == len({("LSTM", "cpu"), (BROKEN, "cpu")} & places)
    tab.reload()
    assert len(column(tab, 1)) == count
    tab.get_by_role("button", name="Reset").click()
    tab.wait_for_function("document.querySelector('#count').value === '5 of 5 rows'")
    assert len(column(tab, 1)) == 5
    assert "#" not in tab.url


def test_a_hash_by_hand(tab):
    tab.evaluate("location.hash = 'architecture=gru&dtype=float32'")
    tab.wait_for_function("document.querySelector('#count').value === '1 of 5 rows'")
    precision = tab.get_by_role("region", name="Errors by precision of matrix products")
    assert precision.locator("tbody tr:visible th").all_inner_texts() == ["GRU"]
    tab.evaluate("location.hash = 'dtype=int8'")
    tab.wait_for_function("document.querySelector('#count').value === '5 of 5 rows'")


def test_every_case_has_its_plot(tab):
    assert tab.locator("figure").count() == 2
    for case in ("LSTM", BROKEN):
        figure = tab.locator("figure", has_text=case)
        assert figure.get_by_role("img", name=f"Error of {case} on cpu over 20 steps").is_visible()
        assert figure.locator("li").all_inner_texts() == [
            "torch float32",
            "JAX float32",
            "torch bfloat16",
            "JAX bfloat16",
        ]
        paths = figure.locator("> svg path").all()
        points = [len(re.findall("[ML]", path.get_attribute("d"))) for path in paths]
        assert points == [STEPS, STEPS - 1] * 2  # one error is not finite
        assert "NaN" not in figure.inner_html()


def test_a_case_leads_to_its_plot(tab):
    tab.get_by_role("button", name="LSTM").first.press("Enter")
    assert tab.evaluate("document.activeElement.dataset.case") == "LSTM"


def test_a_plot_can_be_read_at_a_step(tab):
    figure = tab.locator("figure").first
    figure.locator("> svg").hover(position={"x": 2, "y": 40})
    readings = figure.locator("li").all_inner_texts()
    assert readings[:2] == ["torch float32 1.0e-7", "JAX float32 not finite"]
    tab.locator("h1").hover()
    assert figure.locator("li").first.inner_text() == "torch float32"


CONTRAST = """selector => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (color) => {
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((c) =>
      c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [...document.querySelectorAll(selector)].map((element) => {
    let behind = element;
    const paint = (e) => getComputedStyle(e).backgroundColor;
    while (paint(behind) === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    const [low, high] = [luminance(getComputedStyle(element).color), luminance(paint(behind))]
      .sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
}"""


def test_both_schemes_can_be_read(tab):
    backgrounds = set()
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        backgrounds.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        contrasts = tab.evaluate(CONTRAST, "body, p, dt, dd, li, h1, label, th, td, button, span")
        assert min(contrasts) >= 4.5
    assert len(backgrounds) == 2


def test_a_phone_need_not_scroll_sideways(tab):
    tab.set_viewport_size({"width": 360, "height": 740})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.locator(".verdict").first.bounding_box()["x"] < 300
