"""A picture of everything a user could lose to planning, by a walk that is not the library's own."""

from __future__ import annotations

import gc
import hashlib
import random
import types
import weakref
from collections import deque
from functools import partial

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor


def random_states():
    numpy = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()


def picture(*roots):
    """Return, by path, a word for every value reachable through attributes, containers and closures."""
    seen, found = set(), {"random": random_states()}
    waiting = [(f"{position}", root) for position, root in enumerate(roots)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)):
            found[path] = repr(value)
            continue
        found[path] = f"{type(value).__name__} {id(value)}"
        if id(value) in seen:
            continue
        seen.add(id(value))
        waiting += [(f"{path}{step}", part) for step, part in parts(value)]
        if isinstance(value, torch.Tensor):
            found[f"{path}!"] = tensor_words(value)
        elif isinstance(value, torch.Generator):
            found[f"{path}!"] = value.get_state().numpy().tobytes()
        elif isinstance(value, (random.Random, np.random.Generator)):
            found[f"{path}!"] = repr(
                value.getstate() if isinstance(value, random.Random) else value.bit_generator.state
            )
    return found


def parts(value):
    if isinstance(value, torch.Tensor):
        yield from vars(value).items()
        if value.is_leaf:
            yield ".grad", value.grad
        yield "~hooks", value._backward_hooks
        yield "~after", getattr(value, "_post_accumulate_grad_hooks", None)
    elif isinstance(value, dict):
        for key, item in dict.items(value):
            yield f"[{key if isinstance(key, (str, int)) else id(key)}]", item
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{position}]", item) for position, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"<{position}>", item) for position, item in enumerate(sorted(value, key=id)))
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        yield from ((f"~{name}", cell) for name, cell in zip(value.__code__.co_freevars, cells, strict=True))
        yield "~defaults", value.__defaults__
    elif isinstance(value, types.CellType):
        yield "", value.cell_contents
    elif isinstance(value, types.MethodType):
        yield "~self", value.__self__
    elif isinstance(value, partial):
        yield from (("~func", value.func), ("~args", value.args), ("~keywords", value.keywords))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)) and is_users(type(value)):
        yield from ((f".{name}", item) for name, item in vars(value).items())


def is_users(kind):
    return not kind.__module__.startswith(("remat", "threading", "logging", "_pytest", "torch.distributed", "torch._"))


def tensor_words(tensor):
    words = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
    if tensor.layout is not torch.strided or tensor.grad_fn is not None or tensor.device.type == "meta":
        return words
    # A model may be built of fake tensors; that none of a dry run are left is looked for by their identities.
    if isinstance(tensor, FakeTensor):
        return words
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return words
    data = tensor.detach().contiguous().view(-1)
    data = torch.view_as_real(data) if data.is_complex() else data
    return f"{words} {hashlib.blake2b(data.view(torch.uint8).numpy().tobytes()).hexdigest()} at {tensor.data_ptr()}"


def differences(before, after):
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [f"{key}: {str(before.get(key))[:60]} -> {str(after.get(key))[:60]}" for key in keys]


def alive_fakes():
    """Return weak references to the fake tensors that are alive, by identity: the compiler keeps some of its own."""
    return {id(one): weakref.ref(one) for one in gc.get_objects() if issubclass(type(one), FakeTensor)}


def new_fakes(known):
    return [kept for number, kept in alive_fakes().items() if number not in known or known[number]() is not kept()]
