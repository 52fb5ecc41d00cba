"""The report is one file that needs nothing else and says where each number comes from."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest
from remat.planner import Plan
from remat.planner.budget import format_bytes
from remat.planner.show.factory import Subject
from remat.planner.show.report import SECTIONS, report_html, write_report

from .browser import Browser, chromium
from .small_step import BUDGETS, SOLVERS, small_comparison, squares

COMMAND = "remat report --model train.py:build --budget 60%"


class Page(HTMLParser):
    """Collect addresses, figures, rows and text; check that tags are closed in order."""

    VOID = frozenset({"meta", "img", "br", "link", "hr"})

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.names, self.figures, self.rows, self.words = [], [], [], {}, 0, []
        self.inside = None
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        found = dict(attrs)
        self.rows += tag == "tr"
        self.names += [found["id"]] if "id" in found else []
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        self.inside = found.get("id", "") if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.inside = None

    def handle_data(self, data):
        if self.inside is None:
            self.words.append(data)
        elif self.inside.startswith("data-"):
            self.figures[self.inside.removeprefix("data-")] = json.loads(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def html():
    return report_html(small_comparison(), budget="60%", command=COMMAND)


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_nothing_is_fetched_from_elsewhere(html, page):
    assert all(address.startswith(("data:application/json;base64,", "#")) for address in page.addresses)
    own = (
        html.partition('<script id="plotly">')[0] + html.rpartition('<script id="plotly">')[2].partition("</script>")[2]
    )
    assert not re.search(r"https?://|<link|@import|url\(", own)


def test_every_section_can_be_linked_to(page):
    assert {address[1:] for address in page.addresses if address.startswith("#")} == set(SECTIONS)
    assert set(SECTIONS) <= set(page.names)


def test_the_figures_are_whole_and_described(html, page):
    assert set(page.figures) == {"modules", "frontier", "memory", "strip"}
    assert len(re.findall(r'role="img" aria-label="[^"]{10,}"', html)) == 4
    for figure in page.figures.values():
        assert figure["data"]
    planned = small_comparison().planner.timeline(small_comparison().best("60%"))
    axes = page.figures["memory"]["layout"]["meta"]["axes"]
    assert axes["operators"][1][-1] == len(planned.modules)
    assert axes["time"][1][-1] == pytest.approx(planned.moments()[-1], abs=1e-3)


def test_it_carries_the_plan_and_how_to_apply_it(page):
    (address,) = {address for address in page.addresses if address.startswith("data:")}
    assert Plan.from_json(base64.b64decode(address.partition(",")[2])) == small_comparison().best("60%")
    assert "apply(model, plan)" in page.text


def test_it_says_when_on_what_and_by_which_command_it_was_made(page):
    assert COMMAND in page.text
    assert re.search(r"date \d{4}-\d\d-\d\d \d\d:\d\d UTC", page.text)
    assert re.search(r"machine .+ \d+ cores?, \d+ GiB, (1 thread|\d+ threads) for torch", page.text)
    assert "no autocast" in page.text


@pytest.mark.skipif(chromium() is None, reason="no Chromium is installed to open the report with")
def test_a_browser_draws_it_at_two_widths_and_answers_clicks(html, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(html)
    with Browser(chromium()) as browser:
        for width in (1280, 420):
            browser.open(path, width=width)
            assert browser.run("document.querySelectorAll('.main-svg').length") >= 4
            assert browser.run("document.documentElement.scrollWidth") <= width
            wide = "s => s.getBoundingClientRect().right > innerWidth"
            cut = f"[...document.querySelectorAll('.picture svg')].filter({wide})"
            assert browser.run(f"{cut}.length") == 0
            tables = "[...document.querySelectorAll('.wide')].filter(place => place.scrollWidth > place.clientWidth)"
            assert browser.run(f"{tables}.length") == 0
        column = "[...document.querySelectorAll('#solvers td:nth-child(2)')].map(cell => Number(cell.dataset.value))"
        button = "document.querySelector('#solvers th:nth-child(2) button')"
        for order in (sorted, lambda values: sorted(values, reverse=True)):
            browser.run(f"{button}.click()")
            assert browser.run(column) == order(browser.run(column))
        places = "document.getElementById('picture-memory').data[0].x.length"
        ends = "Math.max(...document.getElementById('picture-memory').data[0].x)"
        assert browser.run(f"document.querySelectorAll('#peak .choice')[1].click(); {ends}") == browser.run(places) - 1
        shown = "document.getElementById('picture-frontier').data.filter(trace => trace.visible === false).length"
        assert browser.run(f"document.querySelector('#solvers .legend button').click(); {shown}") > 0
        paper = "getComputedStyle(document.body).backgroundColor"
        before = browser.run(paper)
        assert browser.run(f"document.getElementById('theme').click(); {paper}") != before
        assert browser.requests == [path.as_uri()] * 2
        assert browser.errors == []


def test_it_says_what_it_costs_and_what_the_peak_is(page):
    comparison = small_comparison()
    plan = comparison.best("60%")
    assert format_bytes(comparison.unplanned_peak_bytes) in page.text
    assert format_bytes(plan.predicted_peak_bytes) in page.text
    assert f"{100 * plan.predicted_overhead:.1f} %" in page.text
    assert "optimizer state" in page.text
    assert re.search(r"in the (forward|backward) of [\w.]+: \d+%", page.text)


def test_the_comparison_has_all_its_rows(page):
    for solver in SOLVERS:
        assert page.words.count(solver) >= len(BUDGETS)
    assert "infeasible" in page.words


def test_it_says_how_the_numbers_were_obtained(page):
    profile = small_comparison().planner.profile
    assert profile.times_from.source in page.text
    assert profile.bytes_from in page.text
    assert "every figure of the planned step is a prediction" in page.text
    assert "512 x 32" in page.text
    for package in ("torch", "Python", "remat"):
        assert package in page.words


def test_a_budget_that_nothing_fits_is_said_first_and_the_least_plan_shown():
    page = Page(report_html(small_comparison(), budget=1000))
    assert "adds up" in page.text
    least = min(plan.predicted_peak_bytes for plan in small_comparison().least.values())
    assert "The budget is not met: no plan of the comparison fits 1000 Bytes" in page.text
    assert "over the budget of 1000 Bytes" in page.text
    assert f"With the plan, {format_bytes(least)}" in page.text


def test_a_measured_report_carries_the_verification(tmp_path):
    step = small_comparison().planner.session.step
    subject = Subject(model=step.model, batch=step.args, loss=squares)
    assert write_report(tmp_path / "report.html", small_comparison(), budget="60%", subject=subject) == ""
    page = Page((tmp_path / "report.html").read_text())
    assert "exact against the unmodified model" in page.text
    assert re.search(r"% \(-?[\d.]+ to -?[\d.]+\) as measured", page.text)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
