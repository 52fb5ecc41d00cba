"""`compare` plans every budget with every solver from one profile, and keeps what did not fit in the table."""

from math import isfinite

import pandas as pd
import pytest
from remat.planner import InfeasibleBudgetError
from remat.planner.budget import BudgetError
from remat.planner.compare import COLUMNS, compare

from .small_step import BUDGETS, SOLVERS, build, small_comparison


def test_there_is_one_row_for_each_solver_and_budget():
    frame = small_comparison().frame
    assert list(frame.columns) == list(COLUMNS)
    assert len(frame) == len(BUDGETS) * len(SOLVERS)
    assert not frame.duplicated(["solver", "budget_bytes"]).any()


def test_rows_say_what_their_plans_say():
    comparison = small_comparison()
    rows = comparison.feasible()
    assert len(rows) == len(comparison.plans) > 0
    for row in rows.to_dict("records"):
        plan = comparison.plans[row["solver"], row["budget_bytes"]]
        assert row["predicted_peak_bytes"] == plan.predicted_peak_bytes <= row["budget_bytes"]
        assert row["predicted_overhead"] == plan.predicted_overhead
        assert row["segments"] == len(plan.segments)
        assert row["status"] == plan.status
        assert row["solve_seconds"] > 0
        assert pd.isna(row["measured_peak_bytes"])


def test_the_exact_solver_costs_no_more_than_the_baseline():
    rows = small_comparison().feasible().set_index(["budget_bytes", "solver"])["predicted_overhead"].unstack()
    both = rows.dropna()
    assert len(both) > 0
    assert (both["dp"] <= both["sqrt"] + 1e-12).all()


def test_an_infeasible_budget_stays_in_the_table_with_its_reason_and_the_least_peak():
    rows = small_comparison().frame.query("budget_bytes == 1000")
    assert list(rows["status"]) == ["infeasible"] * len(SOLVERS)
    for row in rows.to_dict("records"):
        assert row["least_peak_bytes"] > 1000
        assert str(row["least_peak_bytes"]) in row["note"]
        assert pd.isna(row["predicted_peak_bytes"])


def test_a_frontier_falls_in_overhead_as_the_peak_grows():
    comparison = small_comparison()
    for solver in SOLVERS:
        frontier = comparison.frontier(solver)
        assert set(frontier["solver"]) == {solver}
        assert frontier["predicted_peak_bytes"].is_monotonic_increasing
        assert (frontier["predicted_overhead"].diff().dropna() < 0).all()


def test_a_solver_that_was_not_compared_has_no_frontier():
    with pytest.raises(BudgetError, match=r"'ilp' was not compared.*sqrt, dp"):
        small_comparison().frontier("ilp")


def test_the_best_plan_is_the_cheapest_that_fits():
    comparison = small_comparison()
    best = comparison.best("60%")
    assert best.predicted_peak_bytes <= 0.6 * comparison.unplanned_peak_bytes
    fitting = [p for p in comparison.plans.values() if p.predicted_peak_bytes <= 0.6 * comparison.unplanned_peak_bytes]
    assert best.predicted_overhead == min(plan.predicted_overhead for plan in fitting)


def test_no_best_plan_under_an_impossible_budget_but_the_least_one_is_offered():
    with pytest.raises(InfeasibleBudgetError, match="smallest peak") as caught:
        small_comparison().best(1000)
    assert caught.value.plan.predicted_peak_bytes == caught.value.least_peak_bytes


def test_bounds_are_at_most_what_any_plan_costs():
    comparison = small_comparison()
    bounds = comparison.lower_bounds()
    assert bounds
    for (_, budget), plan in comparison.plans.items():
        assert bounds.get(budget, 0.0) <= plan.predicted_overhead


def test_the_text_has_a_line_for_every_row():
    lines = small_comparison().table().splitlines()
    assert len(lines) == 2 + len(BUDGETS) * len(SOLVERS)
    assert lines[0].split() == ["solver", "budget", "peak", "added", "bound", "segments", "took", "status"]
    assert sum("infeasible" in line for line in lines) == len(SOLVERS)


def test_shares_are_of_the_peak_by_what_runs_out_as_they_are_for_a_plan(monkeypatch):
    known = small_comparison().planner
    model, batch = known.session.step.model, known.session.step.args[0]
    monkeypatch.setattr(type(known.search.dry_runs), "beside_bytes", lambda runs, record: 2**20)
    found = compare(model, batch, budgets=("60%",), solvers=("none",), planner=known)
    assert found.unplanned_peak_bytes == known.profile.peak_bytes() + 2**20
    assert list(found.frame["budget_bytes"]) == [int(0.6 * found.unplanned_peak_bytes)]


def test_measuring_fills_in_what_the_allocator_saw():
    known = small_comparison()
    model, batch, loss = known.planner.session.step.model, known.planner.session.step.args[0], build()[2]
    found = compare(model, batch, budgets=("60%",), solvers=("dp",), loss=loss, measure=True, planner=known.planner)
    row = found.frame.iloc[0]
    assert row["measured_peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.05)
    assert isfinite(row["measured_overhead"])
    assert known.frame["measured_overhead"].isna().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budgets": ("many",)}, "cannot read the budget 'many'"),
        ({"solvers": ("oracle",)}, "unknown solver 'oracle'"),
        ({"budgets": ()}, "nothing to compare"),
        ({"budgets": "70%"}, r"budgets takes a list, got '70%': pass budgets=\['70%'\]"),
        ({"solvers": "dp"}, r"solvers takes a list"),
    ],
)
def test_what_cannot_be_compared_is_said_before_any_work(options, words):
    said = []
    with pytest.raises(BudgetError, match=words):
        compare(*build()[:2], progress=said.append, **options)
    assert said == []
