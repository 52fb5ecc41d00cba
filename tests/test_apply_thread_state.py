"""Whatever goes wrong, and wherever, nothing of a region stays behind in the thread."""

import contextlib
import copy

import pytest
from functorch.compile import aot_function, nop
from remat.planner.applier import intercept, loop, region
from remat.planner.applier.apply import apply_segments
from remat.planner.applier.internals import function_mode_count, top_hooks
from remat.planner.applier.keeping import Keep, Take
from remat.planner.applier.state import Watched
from remat.planner.applier.tape import Tape
from remat.planner.errors import ApplyError
from torch import nn
from torch.func import functional_call

from .apply_models import Residual, Stack, assert_same, make, saved, segment, train_step

PLACES = [
    *((region, name) for name in ("checkpoint", "ambient_settings", "versions_of", "in_ddp_forward")),
    *(
        (loop, name)
        for name in (
            *("checkpoint_generator", "top_hooks"),
            *("insert_function_mode", "remove_function_mode", "save_beneath"),
        )
    ),
    *((intercept, name) for name in ("begin_runs", "Inputs")),
    (Watched, "now"),
    (Keep, "__enter__"),
    (Take, "run"),
    *((Tape, name) for name in ("record", "finish", "close", "replay")),
]
PLANS = {
    "calls": (Stack, [segment("blocks.0"), segment("blocks.1.feed")]),
    "runs": (
        Residual,
        [
            segment("branches.0", "branches.1", crosses_operators=True),
            segment("branches.2", "branches.3", "branches.4"),
        ],
    ),
    "nested": (
        Stack,
        [segment("blocks.0", "blocks.1", "blocks.2", children=(segment("blocks.1", "blocks.2"),)), segment("blocks.4")],
    ),
    "kept": (Stack, [segment("blocks.0", "blocks.1", save=saved("aten.addmm.default", 0))]),
}


def assert_idle(applied):
    threads = applied._planned.threads
    thread = threads.here
    assert (thread.counts, thread.loop, thread.open, thread.uncounted) == (None, None, [], False)
    assert thread.level is threads.top


class InjectedError(Exception):
    """Raised where a test says."""


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].__name__.rpartition('.')[2]}.{place[1]}")
@pytest.mark.parametrize("name", PLANS)
def test_an_error_at_any_point_leaves_nothing_behind_in_the_thread(name, place, monkeypatch):
    kind, segments = PLANS[name]
    model, x = make(kind)
    plain = train_step(copy.deepcopy(model), x)
    holder, attribute = place
    original = getattr(holder, attribute)
    with apply_segments(model, segments) as applied:
        for number in (1, 2, 5):
            left = number

            def failing(*args, **kwargs):
                nonlocal left
                left -= 1
                if left == 0:
                    raise InjectedError
                return original(*args, **kwargs)

            monkeypatch.setattr(holder, attribute, failing)
            with contextlib.suppress(InjectedError):
                train_step(model, x)
            monkeypatch.setattr(holder, attribute, original)
            assert top_hooks() is None
            assert function_mode_count() == 0
            assert_idle(applied)
            assert_same(train_step(model, x), plain)
            if left > 0:
                # It was not called as often.
                break


def test_a_run_under_aot_function_is_refused_by_name_and_leaves_nothing_behind():
    model, x = make(Stack)
    plain = train_step(copy.deepcopy(model), x)
    other = nn.Linear(16, 4)

    def traced(parameters, x):
        return functional_call(model, parameters, (x,))

    with apply_segments(model, [segment("blocks.0", "blocks.1")]):
        with pytest.raises(ApplyError, match=r"segment blocks\.0 \.\. blocks\.1.*remove\(\) the plan while tracing"):
            aot_function(traced, nop)(dict(model.named_parameters()), x)
        assert top_hooks() is None
        other(x).sum().backward()
        assert_same(train_step(model, x), plain)
