"""What the applier relies on in torch: an upgrade that changes one of these must be noticed here."""

import inspect

import torch
from remat.planner.applier import internals
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint


class Mode(TorchFunctionMode):
    def __init__(self, name, seen):
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(self.name)
        return func(*args, **(kwargs or {}))


def test_the_checkpoint_generator_has_the_signature_it_is_called_with():
    names = list(inspect.signature(checkpoint._checkpoint_without_reentrant_generator).parameters)
    assert names == [
        *("fn", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop", "args", "kwargs")
    ]


def test_a_function_mode_goes_beneath_others_and_comes_out_from_there():
    seen = []
    ours, above = Mode("ours", seen), Mode("above", seen)
    with above:
        internals.insert_function_mode(ours, 0)
        torch.ones(2)
        assert seen == ["above", "ours"]
        assert internals.remove_function_mode(ours)
        assert not internals.remove_function_mode(ours)
        assert internals.function_mode_count() == 1
    assert internals.function_mode_count() == 0


def test_a_tensor_is_saved_beneath_the_hooks_given():
    packed = []

    def pack(name):
        def hook(tensor):
            packed.append(name)
            return tensor

        return hook

    x = torch.ones(2, requires_grad=True) * 2
    with torch.autograd.graph.saved_tensors_hooks(pack("outer"), lambda t: t):
        with torch.autograd.graph.saved_tensors_hooks(pack("own"), lambda t: t):
            own = internals.top_hooks()
            with torch.autograd.graph.saved_tensors_hooks(pack("inner"), lambda t: t):
                back = internals.save_beneath(own, x)
                assert packed == ["outer"]
                x.exp()
        assert packed == ["outer", "inner"]
    assert torch.equal(back(), x)
    assert back().grad_fn is x.grad_fn


def test_node_numbers_tell_which_tensors_are_newer():
    x = torch.ones(2, requires_grad=True)
    before = x * 2
    mark = internals.next_node_number()
    after = before * 2
    assert internals.node_number(before.grad_fn) < mark <= internals.node_number(after.grad_fn)


def test_versions_count_changes_in_place():
    x, y = torch.ones(2), torch.ones(2)
    before = internals.versions_of([x, y])
    x.add_(1)
    assert internals.versions_of([x, y]) == [before[0] + 1, before[1]]
    with torch.inference_mode():
        assert internals.versions_of([torch.ones(2)]) == [0]


def test_ambient_settings_come_back():
    settings = internals.ambient_settings()
    try:
        torch.set_default_dtype(torch.float64)
        torch.backends.cuda.enable_math_sdp(not settings[2])
        assert internals.ambient_settings() != settings
    finally:
        internals.set_ambient(settings)
    assert internals.ambient_settings() == settings


def test_the_compiler_tells_when_it_takes_frames():
    assert not internals.compiler_callback()
    inside = []

    @torch.compile(backend="eager")
    def function(x):
        torch._dynamo.graph_break()
        torch._dynamo.disable(lambda: inside.append(internals.compiler_callback()))()
        return x + 1

    function(torch.ones(2))
    assert inside == [None]


def test_a_module_list_has_no_forward_and_a_sequential_has_one():
    assert not internals.has_forward(torch.nn.ModuleList())
    assert internals.has_forward(torch.nn.Sequential())


def test_settings_of_accelerators_come_back():
    changed = {True: False, False: True}
    for read, bring_back in internals._ACCELERATOR:
        before = read()
        other = before[::-1] if isinstance(before, list) else changed.get(before, (False, False))
        try:
            bring_back(other)
            assert read() == other
        finally:
            bring_back(before)
        assert read() == before


def test_a_region_tells_what_it_saved_and_its_replay_can_start_anew():
    seen, told = [], []

    def body(x):
        seen.append(internals.TorchReplay() if told else internals.tensors_saved_in_forward())
        y = x.sin().exp()
        if len(seen) == 2:
            told.append(seen[1].saved)
            seen[1].again((x,))
        return y

    def forward(x):
        y = body(x)
        told.append(len(seen[0]))
        return y

    x = torch.rand(4, requires_grad=True)
    checkpoint.checkpoint(lambda x: body(x) if told else forward(x), x, use_reentrant=False).sum().backward()
    # Both tensors are saved in forward; the replay is stopped at the second one, so it starts anew from a body's start.
    assert told[0] == 2
    assert torch.equal(x.grad, (x.sin().exp() * x.cos()).detach())
