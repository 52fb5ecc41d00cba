"""Planning closes the loop: the model of memory against the dry run, budgets kept, impossible ones explained."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from remat.planner import InfeasibleBudgetError, Plan, Planner, answer, apply, compare, plan, verify
from remat.planner.budget import BudgetError, format_bytes, parse_budget
from remat.solvers import SOLVERS, simulate
from torch import nn

from .zoo import ZOO


@pytest.fixture(scope="module")
def planners():
    made = {}
    for name in ("chain", "gpt2", "unet", "batch_norm", "looped"):
        model, batch, loss = ZOO[name]()
        made[name] = (Planner.of(model, batch, loss=loss, repeats=1), model, batch, loss)
    return made


@pytest.mark.parametrize("name", ["chain", "gpt2", "unet", "batch_norm", "looped"])
def test_the_memory_model_of_the_unplanned_step_is_exact(planners, name):
    planner = planners[name][0]
    peak = planner.profile.peak_bytes()
    assert simulate(planner.bridge.problem(peak), ()).peak_bytes == peak


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("name", ["chain", "gpt2", "unet", "looped"])
def test_the_memory_model_of_a_planned_step_is_the_dry_runs(planners, name, share):
    planner = planners[name][0]
    peak, fixed = planner.profile.peak_bytes(), planner.profile.fixed_bytes()
    problem = planner.bridge.problem(int(fixed + share * (peak - fixed)))
    try:
        solution = SOLVERS["dp"](problem)
    except ValueError as error:
        solution = error.solution
    draft = planner.search.draft(solution)
    unseen = planner.profile.unseen_bytes
    dry = draft.dry_run.record.peak_bytes() + unseen
    assert solution.peak_bytes == pytest.approx(dry, rel=2e-3)


@pytest.mark.parametrize("solver", ["dp", "ilp", "dp_nested", "auto", "greedy", "uniform", "all", "sqrt"])
def test_no_plan_exceeds_its_budget(planners, solver):
    planner, model, batch, loss = planners["gpt2"]
    for budget in ("80%", "60%"):
        made = planner.plan(budget, solver=solver)
        assert made.predicted_peak_bytes <= made.budget_bytes
        found = verify(model, batch, made, loss=loss, repeats=0)
        assert found.exact
        assert found.measured_peak_bytes <= made.budget_bytes


def test_better_solvers_cost_no_more(planners):
    planner = planners["gpt2"][0]
    peak = planner.profile.peak_bytes()
    for share in (0.9, 0.75, 0.6):
        problem = planner.bridge.problem(int(share * peak))
        costs = [SOLVERS[name](problem).added_ns for name in ("ilp", "dp", "sqrt")]
        assert costs == sorted(costs)


def test_an_impossible_budget_names_the_least_peak_and_what_holds_it(planners):
    planner = planners["gpt2"][0]
    with pytest.raises(InfeasibleBudgetError, match="smallest peak found") as caught:
        planner.plan(planner.profile.fixed_bytes() // 2, solver="dp")
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.plan.predicted_peak_bytes == error.least_peak_bytes
    assert "parameters" in str(error)
    assert f"Raise the budget to {format_bytes(error.least_peak_bytes)} ({error.least_peak_bytes} bytes)" in str(error)
    again = planner.plan(error.least_peak_bytes, solver="dp")
    assert again.predicted_peak_bytes <= error.least_peak_bytes


def test_logits_that_no_checkpoint_can_free_are_named():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
            self.head = nn.Linear(8, 4000, bias=False)

        def forward(self, x):
            return self.head(self.body(x))

    with pytest.raises(InfeasibleBudgetError, match=r"the loss|head") as caught:
        plan(Head(), torch.randn(256, 8), "20%", solver="dp", loss=lambda out: out.log_softmax(-1)[:, 0].mean())
    assert caught.value.least_peak_bytes > 0.5 * caught.value.plan.unplanned_peak_bytes


def test_a_budget_above_the_unplanned_peak_checkpoints_nothing(planners):
    made = planners["gpt2"][0].plan("100%", solver="dp")
    assert made.segments == ()
    assert made.predicted_overhead == 0.0


def test_headroom_is_kept_free(planners):
    made = planners["gpt2"][0].plan("80%", solver="dp", headroom=0.1)
    assert made.predicted_peak_bytes <= 0.9 * made.budget_bytes


def test_the_optimizers_step_is_part_of_the_peak():
    model, batch, loss = ZOO["chain"]()
    planner = Planner.of(model, batch, loss=loss, optimizer="adamw", repeats=0)
    with pytest.raises(InfeasibleBudgetError, match="optimizer") as caught:
        planner.plan(planner.profile.parts.optimizer_step_peak - 1, solver="dp")
    assert caught.value.least_peak_bytes >= planner.profile.parts.optimizer_step_peak


def test_a_plan_is_applied_verified_saved_and_removed(tmp_path):
    model, batch, _ = ZOO["gpt2"]()
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    made = plan(model, batch, budget="60%", solver="dp")
    applied = apply(model, made)
    found = verify(model, batch, made, repeats=1)
    assert found.exact
    assert found.repeatable
    assert found.measured_overhead is not None
    assert any("forward" in vars(module) for module in model.modules())
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    applied.remove()
    assert all(vars(module) == before[path] for path, module in model.named_modules())


def test_a_planned_model_can_be_planned_again():
    model, batch, loss = ZOO["chain"]()
    with apply(model, plan(model, batch, "80%", solver="dp", loss=loss)):
        again = plan(model, batch, "75%", solver="dp", loss=loss)
        assert again.unplanned_peak_bytes > again.predicted_peak_bytes


def test_verify_finds_a_replay_that_computes_something_else():
    calls = []

    class Drifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            calls.append(1)
            return torch.tanh(self.inner(x) * len(calls))

    from remat.planner.plan import Call, PlannedSegment

    model = nn.Sequential(Drifts(), nn.Linear(16, 1))
    made = Plan(segments=(PlannedSegment(members=(Call(module="0"),)),), predicted_peak_bytes=0)
    calls.clear()
    found = verify(model, torch.randn(4, 16), made, repeats=0)
    assert not found.exact
    assert "0.inner.weight" in found.gradients.unequal


class Caching(nn.Module):
    """Grows a cache from block to block, which is on by default."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.blocks = nn.ModuleList([CachingBlock() for _ in range(3)])

    def forward(self, x, use_cache=None):
        cache = [] if (self.config.use_cache if use_cache is None else use_cache) else None
        for block in self.blocks:
            x = block(x, cache)
        return x


class CachingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x, cache):
        if cache is not None:
            cache.append(x)
        return x + self.down(self.up(x).tanh())


def test_where_a_cache_keeps_blocks_from_being_replayed_the_refusal_begins_with_that():
    torch.manual_seed(0)
    model, x, how = Caching(), torch.randn(256, 32), {"solver": "dp", "repeats": 0}
    advice = (
        "with use_cache on, which keeps 3 blocks from being replayed: set model.config.use_cache = False (or put "
        "use_cache=False into the batch) and plan again"
    )
    with pytest.raises(InfeasibleBudgetError, match=re.escape(f"no dp plan fits 1.0 KiB {advice}")) as caught:
        plan(model, x, "1KiB", **how)
    assert "and plan again. The smallest peak found so is" in str(caught.value)
    assert str(caught.value).count("use_cache = False") == 1
    page = str(answer(model, x, "1KiB", **how))
    assert f"? **No**, {advice}; this is the least peak found so." in page
    assert "because each changes an object passed to it (a cache? put use_cache=False into the batch" in page
    assert "? **Yes**. " in str(answer(model, x, "100%", **how))
    assert "? **No**: this is the least peak found. " in str(answer(model, {"x": x, "use_cache": False}, "1KiB", **how))
    model.config.use_cache = False
    with pytest.raises(InfeasibleBudgetError, match=r"no dp plan fits 1\.0 KiB: the smallest peak found is"):
        plan(model, x, "1KiB", **how)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GiB", 8 * 2**30), ("750 MB", 750 * 10**6), ("50%", 500), (123, 123), ("2.5KiB", 2560), ("770000", 770000)],
)
def test_budgets_are_read(text, expected):
    assert parse_budget(text, 1000) == expected


@pytest.mark.parametrize("text", ["", "8 gigs", "-1GiB", 0, -5, None, 3.5, True, "0%", "GiB"])
def test_a_budget_that_cannot_be_read_is_refused(text):
    with pytest.raises(BudgetError, match="pass bytes as an int"):
        parse_budget(text, 1000)


def test_bytes_are_written_for_people():
    assert [format_bytes(n) for n in (12, 2048, 3 * 2**20, 5 * 2**30)] == ["12 Bytes", "2.0 KiB", "3.0 MiB", "5.00 GiB"]


@pytest.mark.parametrize(("headroom", "solver"), [(1.0, "dp"), (-0.1, "dp"), (0.0, "best")])
def test_wrong_settings_are_refused_before_anything_is_profiled(headroom, solver):
    model, batch, loss = ZOO["chain"]()
    with pytest.raises(BudgetError):
        plan(model, batch, "50%", solver=solver, headroom=headroom, loss=loss)


class Taught(nn.Module):
    """Calls its blocks without gradients first, and initialises a parameter from what it sees."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)]
        )
        self.offset = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        with torch.no_grad():
            target = x
            for block in self.blocks:
                target = block(target)
            self.offset.copy_(target.mean(0))
        out = x
        for block in self.blocks:
            out = block(out)
        return (out - target + self.offset).square().mean()


def test_calls_without_gradients_are_counted_apart_and_parameters_written_in_forward_are_put_back():
    torch.manual_seed(0)
    model, batch = Taught().train(), torch.randn(256, 32)
    made = plan(model, batch, "60%", solver="dp", loss=lambda out: out)
    assert made.segments
    assert all(call.index == 0 for segment in made.segments for call in segment.members)
    assert torch.equal(model.offset, torch.zeros(32))
    found = verify(model, batch, made, loss=lambda out: out, repeats=0)
    assert found.exact
    assert found.within_budget


def test_a_small_number_without_a_unit_is_refused_as_text():
    with pytest.raises(BudgetError, match='write "60%"'):
        parse_budget("60", 1 << 30)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("0.6", 'write "60%" or "0.6GiB"'),
        (0.6, 'a share is written "60%"'),
        ("auto", r'"auto" is for plan_once and the callbacks of trainers.*pass bytes as an int'),
    ],
)
def test_a_budget_that_was_meant_otherwise_says_how_it_is_written(budget, words):
    with pytest.raises(BudgetError, match=words):
        parse_budget(budget, 1 << 30)


@pytest.mark.parametrize(("budget", "meant"), [(60, '"60%", "60GiB" or "60MiB"'), (8192, "'8192MiB'")])
def test_a_refusal_asks_what_a_number_below_the_parameters_bytes_was_meant_as(budget, meant):
    model = nn.Linear(64, 64)
    with pytest.raises(InfeasibleBudgetError, match=rf"A number alone is bytes: did you mean {meant}\?") as refused:
        plan(model, torch.randn(2, 64), budget, repeats=0)
    assert refused.value.least_peak_bytes > budget
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(model, torch.randn(2, 64), "10%", repeats=0)
    assert "did you mean" not in str(refused.value)


def test_a_planner_made_for_something_else_is_refused_and_says_what_would_be_ignored():
    batch = torch.randn(64, 16)
    first = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    other = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    planner = Planner.of(first, batch, loss=loss, repeats=0)
    plan(first, batch, "100%", solver="none", planner=planner, loss=loss, accumulation=False)
    wrong = (
        ("another model", other, batch, {}),
        ("another optimizer", first, batch, {"optimizer": "adamw"}),
        ("another accumulation", first, batch, {"accumulation": True}),
        ("another loss", first, batch, {"loss": lambda output: output.mean()}),
        ("another ranks", first, batch, {"ranks": 2}),
        ("another units", first, batch, {"units": [first[0]]}),
        ("other shapes", first, torch.randn(32, 16), {}),
    )
    for words, model, given, options in wrong:
        with pytest.raises(ValueError, match=words):
            plan(model, given, "100%", solver="none", planner=planner, **options)
        with pytest.raises(ValueError, match=words):
            compare(model, given, budgets=("100%",), solvers=("none",), planner=planner, **options)


def test_a_misspelt_option_is_named_with_the_one_that_was_meant():
    with pytest.raises(TypeError, match="did you mean 'optimizer'"):
        plan(nn.Linear(2, 2), torch.randn(2, 2), "50%", optimiser="adamw")
    for call, word, meant in (
        (plan, "sovler", "solver"),
        (answer, "sovler", "solver"),
        (compare, "mesure", "measure"),
        (plan, "progres", "progress"),
    ):
        given = () if call is compare else ("50%",)
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{word}': did you mean '{meant}'"):
            call(nn.Linear(2, 2), torch.randn(2, 2), *given, **{word: "dp"})
    with pytest.raises(TypeError, match=r"what can be given is model, batch, .*solver, .*loss, optimizer"):
        plan(nn.Linear(2, 2), torch.randn(2, 2), "50%", quxx=1)


class WithTable(nn.Module):
    """Keeps one table as an attribute from the beginning, and another from its first forward on."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        )
        self.table, self.made = torch.randn(256, 1024), None

    def forward(self, x):
        if self.made is None:
            self.made = torch.ones(512, 512)
        return self.blocks(x) * torch.tensor(2.0) + self.table[:64, :64].mean() + self.made.mean()


def test_what_a_step_reads_besides_the_models_own_tensors_counts_in_the_measured_peak():
    torch.manual_seed(0)
    model, head, x = WithTable(), nn.Linear(64, 512), torch.randn(512, 64)

    def loss(output):
        return head(output).square().mean()

    found = plan(model, x, "80%", loss=loss, solver="dp", repeats=0)
    verified = verify(model, x, found, loss=loss, repeats=0)
    tables = model.table.nbytes + 4 * 512 * 512 + head.weight.nbytes + head.bias.nbytes
    assert verified.unplanned_measured_peak_bytes > tables + sum(p.nbytes for p in model.parameters())
    assert verified.unplanned_measured_peak_bytes == pytest.approx(found.unplanned_peak_bytes, rel=0.001)
    assert verified.measured_peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=0.001)
