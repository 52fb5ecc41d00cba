"""A model of which a part is compiled is refused by name: what it runs is out of a recorder's sight."""

import pytest
import torch
from remat.planner import plan
from remat.profiler import BatchError, profile

from .small_step import build


def compiled(how):
    model, batch, loss = build(batch=8, blocks=2)
    if how == "a block in place":
        model[1].compile(backend="eager")
    elif how == "a block wrapped":
        model[1] = torch.compile(model[1], backend="eager")
    elif how == "the model in place":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    return model, batch, loss


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("a block in place", "module '1'"),
        ("a block wrapped", "module '1'"),
        ("the model in place", "the model"),
        ("the model wrapped", "the model"),
    ],
)
def test_what_is_compiled_already_is_named_and_left_alone(how, named):
    model, batch, loss = compiled(how)
    for call in (lambda: profile(model, batch, loss=loss), lambda: plan(model, batch, "60%", loss=loss)):
        with pytest.raises(BatchError, match=rf"{named} is compiled already .*plan the model before that"):
            call()
    assert all(parameter.grad is None for parameter in model.parameters())
