"""Plans that treat the blocks of a kind alike, against trying all of them and against the integer programme."""

from dataclasses import replace

import numpy as np
import pytest
from remat.solvers import ALIKE, SOLVERS, BudgetTooSmallError, Segment, Status
from remat.solvers.alike_space import pattern_changes
from remat.solvers.chain import alike_patterns

from .alike_problems import all_alike, problem_of_kinds

LAYOUTS = ("aa", "-aaa-", "aaaa", "aabb", "-aa-bb-", "abab", "a-a", "aba", "aab")


def _problems(seed, count):
    """Problems with all plans that treat blocks alike, and budgets from the least peak up."""
    rng = np.random.default_rng(seed)
    for trial in range(count):
        layout = LAYOUTS[trial % len(LAYOUTS)]
        stages = 2 if "b" in layout else 3
        problem = problem_of_kinds(rng, layout, stages=stages, noise=trial % 3 == 0)
        plans = all_alike(problem)
        peaks = sorted({peak for peak, _ in plans})
        for share in (0.0, 0.2, 0.5, 0.9):
            budget = int(np.quantile(peaks, share))
            least = min(added for peak, added in plans if peak <= budget)
            yield replace(problem, budget_bytes=budget), least, peaks[0]


@pytest.mark.parametrize("name", ["dp", "ilp", "auto"])
def test_the_plan_is_the_best_of_all_that_treat_blocks_alike(name):
    changed = dearer = 0
    for problem, least, _ in _problems(60, 27 if name == "dp" else 9):
        solution = ALIKE[name](problem)
        assert solution.added_ns == least
        assert solution.status is Status.OPTIMAL
        assert solution.peak_bytes <= problem.budget_bytes
        changes = [pattern_changes(kind, solution.segments) for kind in problem.kinds]
        assert all(len(blocks) <= 1 for blocks in changes)
        changed += any(changes)
        dearer += SOLVERS["ilp"](problem).added_ns < least if name == "dp" else 1
    assert changed > 3
    assert dearer > 3


def test_the_least_peak_of_plans_that_treat_blocks_alike_is_named():
    for problem, _, least in list(_problems(61, 9))[::4]:
        with pytest.raises(BudgetTooSmallError, match=f"the least peak it reaches is {least} bytes"):
            ALIKE["dp"](replace(problem, budget_bytes=least - 1))
        assert ALIKE["dp"](replace(problem, budget_bytes=least)).peak_bytes == least


def test_a_solution_says_when_patterns_were_left_out(monkeypatch):
    monkeypatch.setattr(alike_patterns, "MOST_PATTERNS", 2)
    fewer = 0
    for problem, least, _ in list(_problems(62, 18))[1::4]:
        try:
            solution = ALIKE["dp"](problem)
        except BudgetTooSmallError:
            continue
        assert solution.added_ns >= least
        assert solution.peak_bytes <= problem.budget_bytes
        fewer += "cheaper plans may exist" in solution.note
        assert solution.status is not Status.OPTIMAL or not solution.note or solution.added_ns == 0
    assert fewer > 3


def test_without_time_a_plan_is_found_that_fits():
    for problem, least, _ in list(_problems(63, 9))[1::2]:
        solution = ALIKE["dp"](problem, time_limit_s=0.0)
        assert least <= solution.added_ns
        assert solution.peak_bytes <= problem.budget_bytes


def test_blocks_that_overlap_or_correspond_to_nothing_are_refused():
    rng = np.random.default_rng(64)
    problem = replace(problem_of_kinds(rng, "aa"), budget_bytes=1000)
    kind = problem.kinds[0]
    with pytest.raises(ValueError, match="overlap: one ends at stage 3, the next starts at 2"):
        ALIKE["dp"](replace(problem, kinds=(replace(kind, bounds=((0, 1, 2, 3), (2, 3, 4, 5)), operators=((), ())),)))
    with pytest.raises(ValueError, match="as many boundaries"):
        ALIKE["dp"](replace(problem, kinds=(replace(kind, bounds=((0, 3), (3, 4, 6))),)))


def test_a_pattern_is_compared_by_what_corresponds():
    problem = problem_of_kinds(np.random.default_rng(65), "aaa")
    (kind,) = problem.kinds
    same = tuple(Segment(start=3 * block, stop=3 * block + 2) for block in range(3))
    assert pattern_changes(kind, same) == []
    assert pattern_changes(kind, same[:1]) == [1]
    assert pattern_changes(kind, same[1:2]) == [1, 2]
