"""Models that are not there: on meta or fake, planned for a named card without running or allocating anything."""

import dataclasses
import re

import pytest
import torch
from remat.planner import InfeasibleBudgetError, Plan, answer, apply, largest_batch, plan, verify
from remat.planner.finding.planner import Planner
from remat.profiler import Profile, profile
from remat.profiler.cards import CARDS, card
from remat.profiler.roofline import predicted_ns
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

CARD = "h100-80gb"
# Segments of the card's allocator have up to 20 MiB: what is smaller than some of them hardly differs.
ROWS = 16384


def build(width=256, count=4):
    kind = {"dtype": torch.bfloat16}
    blocks = [
        nn.Sequential(
            nn.LayerNorm(width, **kind),
            nn.Linear(width, 4 * width, **kind),
            nn.GELU(),
            nn.Linear(4 * width, width, **kind),
        )
        for _ in range(count)
    ]
    return nn.Sequential(*blocks)


def mean_square(out):
    return out.float().square().mean()


def absent(kind):
    if kind == "meta":
        with torch.device("meta"):
            return build(), torch.empty(ROWS, 256, dtype=torch.bfloat16)
    with FakeTensorMode():
        return build(), torch.empty(ROWS, 256, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_a_model_that_is_not_there_has_the_bytes_of_one_that_is(kind):
    model, batch = absent(kind)
    here = profile(
        build(), torch.zeros(ROWS, 256, dtype=torch.bfloat16), loss=mean_square, device=CARD, optimizer="adamw"
    )
    away = profile(model, batch, loss=mean_square, device=CARD, optimizer="adamw")
    assert (away.live_bytes() == here.live_bytes()).all()
    assert away.parts == here.parts
    assert away.step_ns == here.step_ns


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_planning_for_a_card_runs_nothing_and_leaves_the_model_as_it_was(kind, monkeypatch):
    monkeypatch.setattr("remat.planner.finding.checking.run_steps", None)
    monkeypatch.setattr("remat.profiler.profiling.run_steps", None)
    monkeypatch.setattr("remat.profiler.profiling.time_record", None)
    model, batch = absent(kind)
    before = dict(model.named_parameters())
    made = plan(model, batch, "70%", loss=mean_square, device=CARD, solver="dp")
    assert made.segments
    assert made.predicted_peak_bytes <= made.budget_bytes
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_was_predicted_says_so_wherever_it_is_shown():
    model, batch = absent("meta")
    planner = Planner.of(model, batch, loss=mean_square, device=CARD)
    text = str(planner.profile)
    assert planner.profile.times_from.is_estimate
    assert planner.profile.step_time_from.is_estimate
    assert "torch.profiler" not in text
    assert "measured" not in text
    assert "not there: predicted" in text
    made = planner.plan("70%", solver="dp")
    assert (made.bytes_from, made.times_from) == ("estimated", "estimated")
    assert "bytes estimated, times estimated" in str(made)
    assert "not tried on a real step" in str(made)
    assert Plan.from_json(made.to_json()) == made
    assert Profile.from_json(planner.profile.to_json()) == planner.profile


@pytest.mark.parametrize(("kind", "words"), [("meta", "it is on meta"), ("fake", "it is fake")])
def test_without_a_card_a_model_that_is_not_there_is_refused(kind, words):
    model, batch = absent(kind)
    with pytest.raises(ValueError, match=rf"{words}.*device='h100-80gb'"):
        plan(model, batch, "70%", loss=mean_square)


def test_a_model_that_is_not_there_cannot_be_verified():
    model, batch = absent("meta")
    made = plan(model, batch, "70%", loss=mean_square, device=CARD, solver="dp")
    with pytest.raises(ValueError, match="has no memory"):
        verify(model, batch, made, loss=mean_square)


def test_a_plan_made_without_the_model_acts_on_the_model():
    model, batch = absent("meta")
    made = plan(model, batch, "70%", loss=mean_square, device=CARD, solver="dp")
    found = verify(build(), torch.randn(1024, 256).bfloat16(), made, loss=mean_square, repeats=0)
    assert found.exact


def test_a_budget_below_what_stays_names_the_least_peak():
    model, batch = absent("meta")
    with pytest.raises(InfeasibleBudgetError, match="the smallest peak found is"):
        plan(model, batch, "1MiB", loss=mean_square, device=CARD, optimizer="adamw", solver="dp")


def test_values_that_a_forward_looks_at_are_missed_in_words():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x) if x.sum().item() > 0 else x

    with torch.device("meta"):
        model, batch = Looks(), torch.empty(2, 8)
    with pytest.raises(ValueError, match=r"cannot run on fake tensors.*nothing can be run instead"):
        profile(model, batch, loss=mean_square, device=CARD)


def test_a_product_takes_the_time_of_its_operations_and_a_copy_that_of_its_bytes():
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.GELU()), torch.empty(4096, 4096)
    recorded = profile(model.bfloat16(), batch.bfloat16(), loss=mean_square, device=CARD)
    product = next(o for o in recorded.operators if o.operator.startswith("aten.mm"))
    gelu = next(o for o in recorded.operators if o.operator == "aten.gelu.default")
    assert product.flops == 2 * 4096**3
    assert product.forward_ns == round(1e9 * product.flops / (0.65 * 989.4e12))
    assert gelu.moved_bytes == 2 * 2 * 4096**2
    assert gelu.forward_ns == round(1e9 * gelu.moved_bytes / (0.8 * 3350e9))
    assert recorded.step_ns == sum(predicted_ns(o, card(CARD)) for o in recorded.operators)


def test_the_products_of_a_mixtures_experts_are_counted():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 64, 128, dtype=torch.bfloat16))

        def forward(self, x, ends):
            return nn.functional.grouped_mm(x, self.weight, offs=ends)

    with torch.device("meta"):
        model, batch = Experts(), torch.empty(512, 64, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([128, 256, 384, 512], dtype=torch.int32)
    recorded = profile(model, (batch, ends), loss=mean_square, device=CARD)
    assert [o.flops for o in recorded.operators if "grouped" in o.operator] == [2 * 512 * 64 * 128] * 3


def test_a_causal_mask_halves_attentions_operations():
    class Attends(nn.Module):
        def __init__(self, causal):
            super().__init__()
            self.linear, self.causal = nn.Linear(64, 64), causal

        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(self.linear(x), x, x, is_causal=self.causal)

    def flops(causal):
        with torch.device("meta"):
            model, batch = Attends(causal).bfloat16(), torch.empty(2, 4, 256, 64, dtype=torch.bfloat16)
        recorded = profile(model, batch, loss=mean_square, device=CARD)
        of_attention = [o.flops for o in recorded.operators if "attention" in o.operator]
        assert len(of_attention) == 2
        return sum(of_attention)

    assert flops(causal=False) == 2 * flops(causal=True) > 0


@pytest.mark.parametrize("name", ["t4-16gb", "h200-141gb"])
def test_a_slower_card_is_predicted_to_be_slower(name):
    model, batch = absent("meta")
    predicted = profile(model, batch, loss=mean_square, device=name)
    assert predicted.device.startswith(name)
    faster = profile(model, batch, loss=mean_square, device=CARD)
    assert (predicted.step_ns > faster.step_ns) == (CARDS[name].bandwidth < CARDS[CARD].bandwidth)


def test_ranks_of_a_model_that_is_not_there_hold_what_those_of_one_that_is_hold():
    model, batch = absent("meta")
    options = {"loss": mean_square, "device": CARD, "optimizer": "adamw", "ranks": 4}
    away = Planner.of(model, batch, units=list(model), **options).profile
    real = build()
    here = Planner.of(real, torch.zeros(ROWS, 256).bfloat16(), units=list(real), **options).profile
    assert dataclasses.replace(away, notes=()) == dataclasses.replace(here, notes=())


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        x = self.linear(x)
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("name", "dtype", "kernel"),
    [(CARD, torch.bfloat16, "flash"), (CARD, torch.float32, "efficient"), ("v100-32gb", torch.float16, "efficient")],
)
def test_attention_is_recorded_as_the_card_takes_it(name, dtype, kernel):
    with torch.device("meta"):
        model, batch = Attends().to(dtype), torch.empty(1, 4, 128, 64, dtype=dtype)
    recorded = profile(model, batch, loss=mean_square, device=name)
    called = [o.operator for o in recorded.operators if "attention" in o.operator]
    assert [name.split(".")[1] for name in called] == [
        f"_scaled_dot_product_{kernel}_attention",
        f"_scaled_dot_product_{kernel}_attention_backward",
    ]


def test_the_budget_is_on_what_the_card_reserves():
    model, batch = absent("meta")
    planner = Planner.of(model, batch, loss=mean_square, device=CARD)
    assert planner.session.budget_on == "reserved"
    beside = planner.search.dry_runs.beside_bytes(planner.profile)
    assert beside > 0
    assert planner.search.dry_runs.unplanned_peak_bytes() == planner.profile.peak_bytes() + beside
    made = planner.plan("70%", solver="dp")
    assert made.unplanned_peak_bytes == planner.search.dry_runs.unplanned_peak_bytes()
    assert "what the card reserves" in str(made)


def test_plans_use_the_budget_where_what_the_card_reserves_beside_tensors_differs():
    # Segments of the allocator are as large as the model: what is reserved beside tensors differs from plan to plan.
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 384), nn.SiLU(), nn.Linear(384, 96)) for _ in range(5)]
        model = nn.Sequential(nn.Embedding(500, 96), *blocks, nn.Linear(96, 500))
        tokens = torch.empty(16, 64, dtype=torch.long)
    planner = Planner.of(model, tokens, loss=mean_square, device="h100-80gb")
    alone = {budget: planner.plan(budget, solver="dp").predicted_overhead for budget in ("60%", "70%", "85%")}
    # Asked for as many bytes of tensors as beside the unplanned step's fit, plans of up to .18 were found.
    assert all(0 < added < 0.1 for added in alone.values())
    assert planner.plan("60%", solver="auto").predicted_overhead <= alone["60%"]


@pytest.mark.parametrize("solver", ["auto", "dp"])
def test_a_step_that_fits_has_no_segments(solver):
    model, batch = absent("meta")
    assert plan(model, batch, "70GiB", loss=mean_square, device="h100-80gb", solver=solver).segments == ()


def test_gathering_has_streams_of_its_own():
    model, batch = absent("meta")
    recorded = Planner.of(model, batch, loss=mean_square, device=CARD, ranks=4, units=list(model)).profile
    streams = {kind: {s.stream for s in recorded.storages if s.kind == kind} for kind in ("activation", "gradient")}
    # Buffers that are gathered into count as activations; what is reduced is a gradient at once.
    assert streams == {"activation": {0, 1}, "gradient": {2}}


def test_autocast_around_planning_is_the_cards():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
        batch = torch.empty(2 * ROWS, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = plan(model, batch, "70%", loss=mean_square, device=CARD, solver="dp")
    assert made.circumstances.autocast == {"cuda": "bfloat16"}
    assert made.circumstances.device.startswith(f"cuda ({CARD}")
    model.to_empty(device="cpu")
    with apply(model, made), pytest.warns(UserWarning, match="planned with bfloat16 autocast on cuda"):
        model(torch.zeros(512, 64)).sum().backward()


def test_the_largest_batch_of_a_model_that_is_not_there_is_predicted():
    with torch.device("meta"):
        model = build()
    found = largest_batch(
        lambda size: torch.empty(size, 256, dtype=torch.bfloat16, device="meta"),
        "400MiB",
        model=model,
        sizes=(8192, 32768, 1 << 19),
        loss=mean_square,
        device=CARD,
        solver="dp",
    )
    assert [entry.fits for entry in found.tried] == [True, True, False]
    assert "samples/s predicted" in repr(found)
    assert found.table().splitlines()[-1] == f"step times estimated: roofline of {CARD}, nothing was run"


@pytest.mark.parametrize(("budget", "verdict"), [("70%", "**Yes**"), ("1MiB", "**No**: this is the least peak found")])
def test_the_answer_is_a_page_of_predictions(budget, verdict):
    model, batch = absent("meta")
    found = answer(model, batch, budget, loss=mean_square, device=CARD, optimizer="adamw", solver="dp")
    page = str(found)
    assert f"? {verdict}. All figures are predicted; nothing was run." in page
    assert "2.1 million parameters" in page
    assert "measured" not in page
    assert f"{found.per_second:,.0f} samples/s; left out: launching kernels |" in page
    assert "| the optimizer's step | " in page
    assert "| precision | bfloat16 parameters, no autocast |" in page
    assert "| batch | " in page
    assert found.per_second == pytest.approx(1e9 * ROWS / (found.planned_step_ns + found.optimizer_ns))
    assert "the driver's context" in page
    assert found.peak_words in page
    assert "% allocated or reserved beside tensors" in found.peak_words
    shares = [int(share) for share in re.findall(r"(\d+)% ", found.peak_words)]
    assert sum(shares) == pytest.approx(100, abs=len(shares) / 2)


def test_with_several_ranks_the_speed_leaves_collectives_out_by_name():
    model, batch = absent("meta")
    found = answer(model, batch, "100%", loss=mean_square, device=CARD, solver="none", ranks=4, units=list(model))
    assert found.left_out == "the optimizer's step, collectives, launching kernels"


def test_tokens_are_counted_where_the_batch_holds_ids():
    with torch.device("meta"):
        model, ids = (
            nn.Sequential(nn.Embedding(100, 64), *build(width=64, count=2)).bfloat16(),
            torch.zeros(2, 128).long(),
        )
    found = answer(model, ids, "100%", loss=mean_square, device=CARD, solver="none")
    assert found.counted == (256, "tokens")
    assert "Nothing is checkpointed." in str(found)
