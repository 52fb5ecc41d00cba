"""Planning and verifying disturb nothing that a step reaches, wherever it is; the audit in conftest looks on."""

import contextvars
import functools
import inspect
import io
import itertools
import os
import threading
import time
import types
import weakref
from array import array
from collections import OrderedDict

import numpy as np
import pytest
import torch
from remat.planner import apply, compare, largest_batch, plan, verify
from remat.planner.show.report import report_html
from remat.profiler import BatchError, DisturbedError, profile
from remat.profiler.guard import Guard
from remat.profiler.reach import Reach
from torch import nn
from torch.utils.checkpoint import checkpoint

from .audit import differences, picture

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def square(output):
    return output.square().mean()


def stack(*extra):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)], *extra)


def plan_and_verify(model, loss=square, **options):
    made = plan(model, X, "90%", solver="sqrt", loss=loss, **options)
    return made, verify(model, X, made, loss=loss, repeats=0)


def closure_over(head):
    return lambda output: square(head(output))


class Method:
    """A trainer's loss: a method, its weights in a list of a slot."""

    __slots__ = ("held",)

    def __init__(self, head):
        self.held = [head]

    def loss(self, output):
        return square(self.held[0](output))


HEAD = None


def through_global(output):
    return square(HEAD(output))


def as_global(head):
    global HEAD
    HEAD = head
    return through_global


LOSSES = {
    "closure": closure_over,
    "method": lambda head: Method(head).loss,
    "partial": lambda head: functools.partial(lambda head, output: square(head(output)), head),
    "default": lambda head: lambda output, head=head: square(head(output)),
    "global": as_global,
    "module": lambda head: nn.Sequential(head, type("Square", (nn.Module,), {"forward": lambda self, x: square(x)})()),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_with_weights_and_statistics_of_its_own_keeps_them_and_its_gradients_count(kind):
    model, head = stack(), nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8))
    before = picture(head)
    made, found = plan_and_verify(model, LOSSES[kind](head))
    assert differences(before, picture(head)) == []
    assert found.exact
    without = plan(stack(), X, "100%", solver="none", loss=square).unplanned_peak_bytes
    assert made.unplanned_peak_bytes >= without + head[0].weight.nbytes


def test_a_loss_with_weights_trains_after_planning():
    model, center = stack(), nn.Parameter(torch.ones(32))

    def loss(output):
        return square(output - center)

    apply(model, plan(model, X, "90%", solver="sqrt", loss=loss))
    optimizer = torch.optim.SGD([*model.parameters(), center], lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    loss(model(X)).backward()
    optimizer.step()
    assert not torch.equal(center, torch.ones(32))


def test_an_optimizer_over_model_and_loss_is_counted():
    model, head = stack(), nn.Linear(32, 8)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    parts = profile(model, X, loss=closure_over(head), optimizer=optimizer, repeats=0).parts
    trained = [*model.parameters(), *head.parameters()]
    assert parts.optimizer == sum(2 * parameter.nbytes + 4 for parameter in trained)


def stepping(model, attach):
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    attach(model, step)
    return optimizers


def after_accumulation(model, step):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def with_module_hooks(model, step):
    def halve(module, given, received):
        for parameter in module.parameters():
            parameter.data.mul_(0.5)

    # The first block's inputs need no gradient, of which such a hook warns.
    for block in model[1:]:
        block.register_full_backward_hook(halve)


@pytest.mark.parametrize("attach", [after_accumulation, with_module_hooks])
def test_an_optimizer_in_hooks_of_backward_is_not_stepped_by_planning(attach):
    model, twin = stack(), stack()
    optimizers, _ = stepping(model, attach), stepping(twin, attach)
    before = picture(model)
    made, found = plan_and_verify(model)
    assert differences(before, picture(model)) == []
    assert not any(optimizer.state for optimizer in optimizers.values())
    assert found.exact
    apply(model, made)
    for one in (model, twin):
        for _ in range(2):
            square(one(X)).backward()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_gradients_that_hooks_free_in_backward_are_counted_so():
    plain, hooked = stack(), stack()
    stepping(hooked, after_accumulation)
    ordinary = profile(plain, X, loss=square, repeats=1)
    freed = profile(hooked, X, loss=square, repeats=1)
    assert ordinary.parts.gradients == sum(parameter.nbytes for parameter in plain.parameters())
    assert freed.parts.gradients == 0
    assert freed.parts.optimizer == sum(parameter.nbytes for parameter in plain.parameters())


def test_hooks_that_step_are_refused_by_name_where_no_copy_of_the_weights_fits(monkeypatch):
    model = stack()
    stepping(model, after_accumulation)
    monkeypatch.setattr("remat.profiler.snapshot.fits", lambda nbytes, device: False)
    with pytest.raises(DisturbedError, match="hooks run in backward"):
        profile(model, X, loss=square, repeats=0)
    assert profile(stack(), X, loss=square, repeats=0).parts.gradients > 0


class Wrapper:
    """As trainers hand optimizers around: reads and writes go through."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups):
        self.optimizer.param_groups = groups


def test_a_wrapped_optimizer_counts_as_the_one_inside_and_keeps_its_state():
    model = stack()
    inner = torch.optim.AdamW(model.parameters())
    square(model(X)).backward()
    inner.step()
    before = picture(inner)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
    plain = profile(model, X, loss=square, optimizer="adamw", repeats=0).parts
    for optimizer in (Wrapper(inner), schedule, inner):
        assert profile(model, X, loss=square, optimizer=optimizer, repeats=0).parts == plain
    assert [line for line in differences(before, picture(inner)) if ".state" in line] == []


def test_a_wrapper_that_does_more_is_refused_by_name():
    model = stack()

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base):
            self.base_optimizer = base
            super().__init__(base.param_groups, {})

    with pytest.raises(BatchError, match=r"Lookahead around another one.*optimizer\.base_optimizer"):
        profile(model, X, loss=square, optimizer=Lookahead(torch.optim.SGD(model.parameters())), repeats=0)


TABLES = {}


@functools.lru_cache
def table(length):
    return torch.arange(length * 32.0).view(length, 32).sin()


class Made(nn.Module):
    """Makes tables and a mask at its first use, in every place where libraries keep such."""

    held = types.SimpleNamespace(table=None)

    def __init__(self, config):
        super().__init__()
        self.net, self.config, self.mask = (
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)),
            config,
            None,
        )

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(len(x), 32).tril()
        if len(x) not in TABLES:
            TABLES[len(x)] = torch.ones(len(x), 32).cumsum(0)
        if Made.held.table is None:
            Made.held.table = torch.ones(32).cumsum(0)
        if self.config.kind is None:
            self.config.kind = "single"
        return x + self.net(x * self.mask + TABLES[len(x)].log() + table(len(x)) + Made.held.table.log())


def test_what_is_made_at_first_use_is_no_trace_of_planning_and_no_hazard():
    def fresh():
        TABLES.clear()
        table.cache_clear()
        Made.held.table = None
        torch.manual_seed(0)
        config = types.SimpleNamespace(kind=None)
        return nn.Sequential(*[Made(config) for _ in range(4)])

    peaks = []
    for warm in (False, True):
        model = fresh()
        if warm:
            model(X)
        made = plan(model, X, "90%", solver="dp", loss=square)
        assert made.segments
        peaks.append((made.unplanned_peak_bytes, made.predicted_peak_bytes))
        if not warm:
            assert (TABLES, table.cache_info().currsize, Made.held.table) == ({}, 0, None)
            assert (model[0].mask, model[0].config.kind) == (None, None)
    assert peaks[0] == peaks[1]


def test_a_parameter_that_forward_gives_other_data_has_its_own_again():
    class Reassigns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x):
            self.weight.data = self.weight.data * 0.5
            return x * self.weight

    model = stack(Reassigns())
    data = model[-1].weight.data_ptr()
    plan_and_verify(model)
    assert model[-1].weight.data_ptr() == data
    assert torch.equal(model[-1].weight, torch.ones(32))


def test_iterators_private_generators_and_settings_stay_where_they_were():
    counter, generator = itertools.count(), torch.Generator().manual_seed(3)

    def loss(output):
        torch.set_float32_matmul_precision("high")
        return square(output) * (1 + next(counter)) + torch.rand((), generator=generator)

    state = generator.get_state()
    plan(stack(), X, "90%", solver="sqrt", loss=loss)
    assert next(counter) == 0
    assert torch.equal(generator.get_state(), state)
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_cannot_be_put_back_is_refused_by_name():
    numbers = (number for number in range(1000))

    def loss(output):
        return square(output) * (1 + next(numbers))

    with pytest.raises(DisturbedError, match="variable 'numbers'"):
        plan(stack(), X, "90%", solver="sqrt", loss=loss)


def training():
    """Return a model in the midst of training, and what is used beside it."""
    model, config = nn.Sequential(*[Made(types.SimpleNamespace(kind=None)) for _ in range(3)], nn.Dropout(0.1)), {}
    averaged = torch.optim.swa_utils.AveragedModel(model)
    model.register_forward_hook(lambda module, args, output: averaged.update_parameters(module))
    model[0].net[0].weight.register_hook(lambda gradient: config.update(seen=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def loss(output):
        config["steps"] = config.get("steps", 0) + 1
        return scaler.scale(square(output))

    for _ in range(2):
        loss(model(X)).backward()
        optimizer.step()
        schedule.step()
    return model, loss, optimizer, (config, averaged, schedule, scaler, TABLES)


CALLS = {
    "profile": lambda model, step: profile(model, X, repeats=1, **step),
    "plan": lambda model, step: plan(model, X, "95%", solver="dp", repeats=1, **step),
    "verify": lambda model, step: verify(
        model, X, plan(model, X, "95%", solver="dp", repeats=0, **step), loss=step["loss"], repeats=1
    ),
    "compare": lambda model, step: compare(model, X, budgets=("70%",), solvers=("sqrt",), repeats=1, **step),
    "report": lambda model, step: report_html(
        compare(model, X, budgets=("70%",), solvers=("sqrt",), repeats=0, **step), budget="70%"
    ),
    "largest_batch": lambda model, step: largest_batch(
        lambda size: X[:size], 1 << 30, model=model, sizes=(64,), solver="sqrt", repeats=1, **step
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_each_call_leaves_model_loss_optimizer_schedule_hooks_and_random_states_as_they_were(call):
    model, loss, optimizer, beside = training()
    before = picture(model, loss, optimizer, *beside)
    CALLS[call](model, {"loss": loss, "optimizer": optimizer})
    assert differences(before, picture(model, loss, optimizer, *beside)) == []


class Importing(OrderedDict):
    """A mapping that makes what it maps to when it is asked, as the automatic classes of transformers do."""

    def _refuse(self, *_):
        raise ValueError("could not find it")

    __iter__ = items = keys = values = __getitem__ = __contains__ = _refuse


class Listing(list):
    __iter__ = __getitem__ = Importing._refuse


MAPPING, LISTING = Importing(), Listing()
dict.__setitem__(MAPPING, "a", {"b": 1})
list.append(LISTING, 1)


class Choosing(nn.Module):
    """A model whose forward speaks of such a mapping."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        )
        self.mapping = MAPPING

    def forward(self, x):
        assert MAPPING is not None
        assert LISTING is not None
        return self.blocks(x)


def test_what_containers_do_of_their_own_when_they_are_asked_is_not_asked_for():
    torch.manual_seed(0)
    model, batch = Choosing(), torch.randn(1024, 32)
    made = plan(model, batch, "80%", loss=lambda out: out.square().mean(), solver="dp", repeats=0)
    assert made.segments
    assert verify(model, batch, made, loss=lambda out: out.square().mean(), repeats=0).exact


def test_what_a_tool_writes_into_forward_is_not_part_of_the_step():
    """Assertions lead into pytest, whose objects other threads change."""
    assert any(not name.isidentifier() for name in Choosing.forward.__code__.co_names), "pytest rewrote nothing"
    reach = Reach({"model": Choosing()})
    assert [name for name in map(reach.path, reach.containers) if "pytest" in name] == []


class Clock:
    """Stands for what another thread moves: the walk does not reach it through a weak reference."""

    calls = 0


def test_what_moved_once_by_chance_is_not_said_to_be_left_otherwise():
    torch.manual_seed(0)
    model, batch, clock, seen = Choosing(), torch.randn(1024, 32), Clock(), [0]
    hidden = weakref.ref(clock)

    def loss(out):
        hidden().calls += 1
        if hidden().calls == moves:
            seen.append(1)
        return out.square().mean()

    moves = 0
    made = plan(model, batch, "80%", loss=loss, solver="dp", repeats=0)
    verify(model, batch, made, loss=loss, repeats=0)
    clock.calls = 0
    verify(model, batch, made, loss=loss, repeats=0)
    for moves in range(1, clock.calls + 1):
        clock.calls = 0
        found = verify(model, batch, made, loss=loss, repeats=0)
        assert found.exact, (moves, found)


class Names(nn.Module):
    """A model whose forward may checkpoint by itself, as those of transformers may."""

    def __init__(self):
        super().__init__()
        self.blocks, self.checkpoints = stack(), False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def test_what_torch_notes_on_its_own_functions_when_they_are_first_called_is_no_difference():
    """A planned step is what calls torch's checkpoint first."""
    vars(inspect.getclosurevars(checkpoint).nonlocals["fn"]).pop("__dynamo_disable", None)
    made = plan(Names(), X, "100%", solver="all", loss=square, repeats=0)
    assert [str(segment.members[0]) for segment in made.segments] == [f"blocks.{number}" for number in range(4)]
    assert not any("not replayed" in note for note in made.notes)


VARIABLE = contextvars.ContextVar("VARIABLE")
KEPT = threading.local()


def put(owner, name, value):
    setattr(owner, name, value)


def objects_in_an_array():
    held = np.empty(1, dtype=object)
    held[0] = []
    return held


WRITES = {
    "a context variable": (
        lambda: VARIABLE,
        lambda var, x: var.set(x if var.get(None) is None else x * 2),
        lambda v: v.get(None),
    ),
    "a thread's own attribute": (
        lambda: KEPT,
        lambda kept, x: put(kept, "calls", getattr(kept, "calls", 0) + 1),
        lambda kept: dict(vars(kept)),
    ),
    "a bytearray": (bytearray, lambda held, x: held.append(1), bytes),
    "an array": (lambda: array("i"), lambda held, x: held.append(1), list),
    "an array of objects": (objects_in_an_array, lambda held, x: held[0].append(1), lambda held: list(held[0])),
    "a file of text": (io.StringIO, lambda held, x: held.write("call"), lambda held: (held.getvalue(), held.tell())),
    "a file of bytes": (io.BytesIO, lambda held, x: held.write(b"call"), lambda held: (held.getvalue(), held.tell())),
    "a weak set": (weakref.WeakSet, lambda held, x: held.add(torch.nn.Linear), len),
    "bits for generators": (lambda: np.random.PCG64(1), lambda bits, x: bits.random_raw(), lambda bits: bits.state),
    "the environment": (
        lambda: os.environ,
        lambda held, x: held.update(REMAT_CALLS=held.get("REMAT_CALLS", "") + "x"),
        lambda held: held.get("REMAT_CALLS"),
    ),
    "how uninitialised memory is filled": (
        lambda: torch.utils.deterministic,
        lambda held, x: put(held, "fill_uninitialized_memory", False),
        lambda held: held.fill_uninitialized_memory,
    ),
    "a kernel switched off": (
        lambda: torch.backends.cuda,
        lambda held, x: held.enable_flash_sdp(False),
        lambda held: held.flash_sdp_enabled(),
    ),
}


class Writing(nn.Module):
    """Writes in forward where no tensor and no container shows it."""

    def __init__(self, held, write):
        super().__init__()
        self.held, self.write = (lambda: held), write

    def forward(self, x):
        self.write(self.held(), x)
        return x * 1.0


@pytest.mark.parametrize("kind", WRITES)
def test_whatever_forward_writes_is_as_it_was(kind):
    make, write, read = WRITES[kind]
    held = make()
    before = read(held)
    made, found = plan_and_verify(stack(Writing(held, write)))
    assert made.segments
    assert found.exact
    assert read(held) == before


def test_a_large_array_that_forward_writes_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("remat.profiler.snapshot.SMALL_BYTES", 1 << 20)
    held = np.zeros(1 << 18)
    with pytest.raises(DisturbedError, match="variable 'held'"):
        plan_and_verify(stack(Writing(held, lambda array, x: np.add(array, 1, out=array))))


def test_what_hooks_of_all_modules_count_is_as_it_was():
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, output: seen.append(module))
    try:
        profile(stack(), X, loss=square, repeats=0)
    finally:
        hook.remove()
    assert seen == []


def test_what_plans_in_another_thread_waits():
    """Random states and settings are the process's: two that put them back would take each other's for their own."""
    order = []

    def work(model):
        with Guard({"model": model}).undisturbed():
            order.append("in")
            time.sleep(0.05)
            order.append("out")

    threads = [threading.Thread(target=work, args=(stack(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["in", "out", "in", "out"]
