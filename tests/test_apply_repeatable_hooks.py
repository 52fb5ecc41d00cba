"""Forward hooks that may run again in a replay: torch's that make a weight anew, and those that the user names."""

import copy
import warnings

import pytest
import torch
from remat.planner import InfeasibleBudgetError, apply, plan
from remat.planner.applier.apply import apply_segments
from remat.profiler import BatchError
from remat.profiler.repeatable_hooks import may_run_again
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from .apply_models import assert_same, segment, train_step

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")


def pruned(layer):
    return prune.random_unstructured(prune.l1_unstructured(layer, "weight", amount=0.3), "weight", amount=0.1)


NORMS = {"weight_norm": weight_norm, "spectral_norm": spectral_norm, "pruned": pruned}


def build(norm, depth=3, width=32):
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.Sequential(norm(nn.Linear(width, 4 * width)), nn.GELU(), norm(nn.Linear(4 * width, width)), nn.Tanh())
            for _ in range(depth)
        ]
    ).train()


def square(output):
    return output.square().mean()


def least(model, batch, **options):
    """Return the plan of the least peak."""
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(model, batch, "1B", solver="dp", loss=square, **options)
    return caught.value.plan


@pytest.mark.parametrize(
    ("count", "words"), [(1, "not replayed: 0, because it carries"), (3, "not replayed: 0, 1, 2, because each carries")]
)
def test_modules_left_out_for_their_hooks_are_told_with_the_option_that_admits_them(count, words):
    model = build(lambda layer: layer)
    for block in model[:count]:
        block.register_forward_hook(lambda *_: None)
    (note,) = (note for note in least(model, torch.randn(8, 32), repeats=0).notes if note.startswith("not replayed"))
    assert note.startswith(f"{words} forward hooks")
    assert "name them in repeatable_hooks=" in note


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("hand", ["blocks", "a run of blocks", "a run inside", "nested"])
def test_weights_that_hooks_make_anew_are_exact_and_their_state_advances_once(norm, hand):
    segments = {
        "blocks": [segment("0"), segment("1"), segment("2")],
        "a run of blocks": [segment("0", "1", "2")],
        "a run inside": [segment("0.0", "0.1", "0.2", "0.3"), segment("1.1", "1.2")],
        "nested": [segment("0", "1", "2", children=(segment("1"),))],
    }[hand]
    plain, model = build(NORMS[norm]), build(NORMS[norm])
    batch = torch.randn(8, 32)
    with apply_segments(model, segments):
        for _ in range(2):
            assert_same(train_step(model, batch), train_step(plain, batch))
    assert_same_state(model, plain)


def assert_same_state(model, plain):
    for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    for ours, theirs in zip(model.modules(), plain.modules(), strict=True):
        if isinstance(ours, nn.Linear):
            assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("norm", NORMS)
def test_two_forwards_before_their_backward_are_exact(norm):
    plain, model = build(NORMS[norm]), build(NORMS[norm])
    batch = torch.randn(8, 32)
    with apply_segments(model, [segment("0", "1"), segment("2")]):
        for each in (model, plain):
            (square(each(batch)) + square(each(2 * batch))).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert_same_state(model, plain)


def test_a_model_with_hooks_that_make_weights_is_planned_as_low_as_without_them():
    batch = torch.randn(512, 32)
    share = {}
    norms = {"plain": lambda layer: layer, "parametrized": parametrizations.weight_norm, **NORMS}
    for name, norm in norms.items():
        found = least(build(norm), batch)
        share[name] = found.predicted_peak_bytes / found.unplanned_peak_bytes
        plain, model = build(norm), build(norm)
        apply(model, found)
        assert_same(train_step(model, batch), train_step(plain, batch))
        assert_same_state(model, plain)
    assert share["weight_norm"] < share["parametrized"] + 0.1, share
    assert max(share["pruned"], share["spectral_norm"]) < share["plain"] + 0.15, share


def scaled(module, args, output):
    return 1.5 * output


def test_hooks_that_the_user_calls_repeatable_are_planned_around_no_more():
    batch = torch.randn(512, 32)

    def hooked():
        model = build(lambda layer: layer)
        for block in model:
            block[0].register_forward_hook(scaled)
        return model

    kept_out, named = least(hooked(), batch), least(hooked(), batch, repeatable_hooks=[scaled])
    assert named.predicted_peak_bytes < 0.9 * kept_out.predicted_peak_bytes
    model = hooked()
    assert least(model, batch, repeatable_hooks=True).predicted_peak_bytes == named.predicted_peak_bytes
    by_module = least(model, batch, repeatable_hooks=[block[0] for block in model])
    assert by_module.predicted_peak_bytes == named.predicted_peak_bytes
    plain = train_step(copy.deepcopy(model), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with apply(model, named):
            assert_same(train_step(model, batch), plain)


@pytest.mark.parametrize("wrong", [scaled, nn.Sequential(), 1])
def test_repeatable_hooks_are_true_or_several(wrong):
    with pytest.raises(BatchError, match=r"repeatable_hooks must be True or several hooks or modules"):
        plan(build(lambda layer: layer), torch.randn(8, 32), "90%", repeatable_hooks=wrong)


def test_a_hook_on_all_modules_leaves_nothing_to_plan_and_is_told_of_when_it_comes_later():
    batch = torch.randn(64, 32)
    found = least(build(lambda layer: layer), batch)
    model, plain = build(lambda layer: layer), build(lambda layer: layer)
    apply(model, found)
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.warns(UserWarning, match="all modules got a forward hook after the plan"):
            assert_same(train_step(model, batch), train_step(plain, batch))
        assert not least(build(lambda layer: layer), batch).segments
    finally:
        handle.remove()


def test_a_pruning_method_of_the_users_is_torchs_hook_and_a_hook_of_the_users_is_not():
    class Own(prune.L1Unstructured):
        pass

    class Hook:
        def __call__(self, module, args):
            return None

    layer = nn.Linear(4, 4)
    Own.apply(layer, "weight", 0.5)
    assert may_run_again(*layer._forward_pre_hooks.values())
    assert not may_run_again(Hook())
    assert may_run_again(Hook(), layer, (layer,))
    assert not may_run_again(Hook(), nn.Linear(4, 4), (layer,))
