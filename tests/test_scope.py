"""`exclude=` and `only=` say which modules segments may hold calls of, for every solver, at any depth."""

import pytest
from remat.planner import InfeasibleBudgetError, PlanError, Planner, StepOptions
from remat.planner.patterns import matching
from remat.profiler import BatchError

from tests.small_step import build

SCOPES = [
    {"exclude": ["0"]},
    {"exclude": ["*.act"]},
    {"only": ["1-2"]},
    {"only": ["*.act", "3.down"]},
    {"only": ["*"], "exclude": ["1.up"]},
]


def planner(**step) -> Planner:
    model, batch, loss = build()
    return Planner.of(model, batch, loss=loss, repeats=0, **step)


def called_inside(plan) -> list[list[str]]:
    """Return for every segment, nested ones too, the modules of its members and of all calls that these make."""
    calls = plan.fingerprint.calls
    members = [[call.module for call in item.members] for segment in plan.segments for item in segment.walk()]
    return [[path for path in calls for m in paths if path == m or path.startswith(f"{m}.")] for paths in members]


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_segments_stay_in_the_scope_whatever_the_solver(scope):
    made = planner(**scope)
    for solver in ("dp", "dp_nested", "ilp", "all"):
        try:
            plan = made.plan("1KB", solver=solver, check=False, time_limit_s=2)
        except InfeasibleBudgetError as error:
            plan, told = error.plan, str(error)
        for inside in called_inside(plan):
            assert not [p for p in inside for pattern in scope.get("exclude", ()) if matching(pattern, p)]
            assert not [p for p in inside if "only" in scope and not any(matching(o, p) for o in scope["only"])]
        assert plan.segments or "act" in str(scope)
        asked = next(iter(scope))
        assert f"as asked by {asked}" in told
        assert any(f"as asked by {asked}" in note for note in plan.notes)
        assert list(getattr(plan.circumstances, asked)) == scope[asked]


def test_without_a_scope_the_same_plan_holds_what_was_excluded():
    with pytest.raises(InfeasibleBudgetError) as raised:
        planner().plan("1KB", solver="dp", check=False)
    inside = [path for paths in called_inside(raised.value.plan) for path in paths]
    assert {"0", "0.act"} & set(inside)
    assert "as asked by" not in str(raised.value)


@pytest.mark.parametrize("option", ["exclude", "only"])
def test_a_pattern_that_names_nothing_is_refused_with_what_there_is(option):
    with pytest.raises(PlanError, match=rf"{option} 'h\.\*': no module of the model has such a path; it has 0, 0\.up"):
        planner(**{option: ["h.*"]})


def test_a_single_pattern_may_be_given_alone_and_anything_else_is_refused():
    assert StepOptions.of({"exclude": "h.*"}) == StepOptions(exclude=("h.*",))
    with pytest.raises(BatchError, match="exclude must be paths of modules, or patterns for them, got int"):
        StepOptions.of({"exclude": [3]})
