"""The report is one file that needs nothing else and says where each number comes from."""

import base64
import re
from html.parser import HTMLParser

import pytest
from remat.planner.budget import format_bytes
from remat.planner.show.factory import Subject
from remat.planner.show.report import report_html, write_report

from .small_step import BUDGETS, SOLVERS, small_comparison, squares


class Page(HTMLParser):
    """Collect addresses, images, rows and text; check that tags are closed in order."""

    VOID = frozenset({"meta", "img", "br", "link", "hr"})

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.images, self.rows, self.words = [], [], [], 0, []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.rows += tag == "tr"
        found = dict(attrs)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag == "img":
            self.images.append(found)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def page():
    return Page(report_html(small_comparison(), budget="60%"))


def test_nothing_is_fetched_from_elsewhere(page):
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    text = report_html(small_comparison(), budget="60%")
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)


def test_the_images_are_whole_and_described(page):
    assert len(page.images) == 4
    for image in page.images:
        assert base64.b64decode(image["src"].partition(",")[2], validate=True).startswith(b"\x89PNG")
        assert len(image["alt"]) > 10


def test_wide_things_scroll_on_a_narrow_screen():
    text = report_html(small_comparison(), budget="60%")
    assert len(re.findall(r'<div class="wide"><(?:img|table)', text)) == 5


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
    assert profile.times_from in page.text
    assert profile.bytes_from in page.text
    assert "every figure of the planned step is a prediction" in page.text
    assert "512 x 32" in page.text
    for package in ("torch", "Python", "remat"):
        assert package in page.words


def test_a_budget_that_nothing_fits_is_said_first_and_the_least_plan_shown():
    page = Page(report_html(small_comparison(), budget=1000))
    least = min(plan.predicted_peak_bytes for plan in small_comparison().least.values())
    assert "The budget is not met: no plan of the comparison fits 1000 B" in page.text
    assert "over the budget of 1000 B" in page.text
    assert f"With the plan, {format_bytes(least)}" in page.text


def test_a_measured_report_carries_the_verification(tmp_path):
    step = small_comparison().planner.session.step
    subject = Subject(model=step.model, batch=step.args, loss=squares)
    write_report(tmp_path / "report.html", small_comparison(), budget="60%", subject=subject)
    page = Page((tmp_path / "report.html").read_text())
    assert "exact against the unmodified model" in page.text
    assert "% as measured" in page.text
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
