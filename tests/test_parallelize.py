"""Two processes under DDP and under tensor parallelism: what one rank is promised is what its allocator gives out."""

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from remat.planner import Plan, Planner, apply
from remat.profiler.allocator import allocated_peak_bytes
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import RANKS, Block, mean_square, on_every_rank

CPU = torch.device("cpu")
KINDS = ("ddp", "ddp in buckets", "ddp without sync", "tensors")
TOLERANCE = 0.01


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(128) for _ in range(4))), torch.randn(512, 128)


def data_parallel(model, mesh):
    # What the first copies of parameters are sent in is no part of a step, and gloo's threads let go of it late.
    return DistributedDataParallel(model, init_sync=False)


def in_buckets(model, mesh):
    return DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)


def tensor_parallel(model, mesh):
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


HOW = {"ddp": data_parallel, "ddp in buckets": in_buckets, "ddp without sync": data_parallel}
HOW |= {"tensors": tensor_parallel}


def measure(kind, text):
    """Return a rank's peak, what is there at the beginning included, over the third step."""
    model, batch = build()
    if text:
        apply(model, Plan.from_json(text))
    accumulates = kind == "ddp without sync"
    entrance = None

    def train():
        nonlocal entrance
        if entrance is None:
            mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
            entrance = HOW[kind](model, mesh) or model
            if entrance is not model:
                entrance.register_comm_hook(None, reduce_bucket_apart)
        for number in range(3):
            if not accumulates:
                entrance.zero_grad(set_to_none=True)
            with entrance.no_sync() if accumulates and number == 1 else nullcontext():
                out = entrance(batch)
                mean_square(out).backward()

    if kind == "tensors":
        # What parameters are divided from is no part of a step; DDP's buckets are.
        train()
        model.zero_grad(set_to_none=True)
    peak = allocated_peak_bytes(train, CPU)
    held = [*model.parameters(), *model.buffers(), batch]
    own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in held]
    return peak + sum(tensor.untyped_storage().nbytes() for tensor in own)


def all_reduce_apart(tensor, operation, group):
    """Reduce on a copy, in a thread of its own: gloo's threads let go of what they are given at some later moment."""
    result = torch.empty_like(tensor)

    def communicate():
        copy = tensor.clone()
        dist.all_reduce(copy)
        result.copy_(copy)

    thread = threading.Thread(target=communicate)
    thread.start()
    thread.join()
    return result


def reduce_bucket_apart(_, bucket):
    buffer, reduced = bucket.buffer(), torch.futures.Future()
    buffer.copy_(all_reduce_apart(buffer, "sum", ""))
    reduced.set_result(buffer)
    return reduced


def run(_, plans):
    functional = torch.library.Library("_c10d_functional", "IMPL")
    functional.impl("all_reduce", all_reduce_apart, "CPU")
    functional.impl("wait_tensor", lambda tensor: tensor, "CPU")
    return {key: measure(key[0], text) for key, text in plans.items()}


@pytest.fixture(scope="module")
def planners():
    found = {}
    for kind in KINDS:
        model, batch = build()
        accumulates = kind == "ddp without sync"
        options = {"loss": mean_square, "ranks": RANKS, "parallelize": HOW[kind], "repeats": 0}
        found[kind] = Planner.of(model, batch, accumulation=accumulates, **options)
    return found


@pytest.fixture(scope="module")
def plans(planners):
    return {kind: planner.plan("70%", solver="dp") for kind, planner in planners.items()}


@pytest.fixture(scope="module")
def measured(plans):
    texts = {(kind, planned): plan.to_json() * planned for kind, plan in plans.items() for planned in (False, True)}
    return on_every_rank(run, texts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ranks_peak_is_as_predicted_without_a_plan_and_with_one(kind, planners, plans, measured):
    predicted = planners[kind].profile.peak_bytes()
    planned = plans[kind].predicted_peak_bytes
    assert plans[kind].segments
    for rank in range(RANKS):
        assert measured[rank][kind, False] == pytest.approx(predicted, rel=TOLERANCE)
        assert measured[rank][kind, True] == pytest.approx(planned, rel=TOLERANCE)


def test_what_ddp_sends_at_its_beginning_is_no_part_of_a_step(planners):
    model, batch = build()
    options = {"loss": mean_square, "ranks": RANKS, "repeats": 0}
    sent = Planner.of(model, batch, parallelize=lambda model, mesh: DistributedDataParallel(model), **options)
    assert sent.profile.peak_bytes() == planners["ddp"].profile.peak_bytes()
