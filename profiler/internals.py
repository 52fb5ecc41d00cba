"""The parts of torch the profiler needs that are not public, in one place: an upgrade of torch has one file to check.

Last checked with torch 2.13.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnnecessaryComparison=false
# pyright: reportAttributeAccessIssue=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch._C._profiler import RecordScope
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import DeviceType
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes

# torch.profiler otherwise writes a line to standard error whenever it starts and stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

# Their packages do not type them as members, so they are imported by name.
_optimizers: Any = import_module("torch.optim.optimizer")
_profiler: Any = import_module("torch.autograd.profiler")

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "autograd_sequence",
    "backward_hooks",
    "below_autocast",
    "clear_cublas_workspaces",
    "composite",
    "cpu_autocasts",
    "cuda_autocast_on_cpu",
    "data_parallel_on_fakes",
    "default_cpu_stream",
    "destroy",
    "fake_mode_is_on",
    "fakes_take_foreach",
    "forward_hooks",
    "is_annotation",
    "is_cached_function",
    "is_compiled",
    "is_in_backward",
    "is_operator",
    "is_plain_tensor",
    "kineto_events",
    "local_part",
    "marks_and_allocations",
    "private_process_group",
    "ran_on_cpu",
    "resizes_told",
    "sdp_priority_order",
    "set_version",
    "storage_key",
    "tensor_hooks",
    "tensor_registries",
    "unset_fake_temporarily",
]


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return what identifies a storage while it is alive, real or fake."""
    return storage._cdata


def autograd_sequence() -> int:
    """Return the number of the autograd node now in backward, or else of the next one that forward makes."""
    node = torch._C._current_autograd_node()
    return torch.autograd._get_sequence_nr() if node is None else node._sequence_nr()


def is_in_backward() -> bool:
    """Return whether a node of autograd's graph is in backward on this thread."""
    return torch._C._current_autograd_node() is not None


def made_by_function(tensor: torch.Tensor) -> bool:
    """Return whether a tensor came from a custom autograd function; those of module backward hooks do not count."""
    node = tensor.grad_fn
    return isinstance(node, BackwardCFunction) and node.name() != "BackwardHookFunctionBackward"


def fake_mode_is_on() -> bool:
    """Return whether operators run on fake tensors now."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def tensor_registries(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries a module keeps its own parameters and buffers in."""
    return module._parameters, module._buffers


def tensor_hooks(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """Return the hooks on a tensor's gradient: before it is accumulated, and after."""
    return [hooks for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if hooks is not None]


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in one storage with strides: not a sparse one, a sharded one, or a wrapper."""
    own: Any = type(tensor)
    plain = own.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return plain and tensor.layout is torch.strided and tensor.device.type != "meta"


def is_cached_function(value: object) -> bool:
    """Return whether a function is cached by functools.lru_cache."""
    return isinstance(value, functools._lru_cache_wrapper)


def backward_hooks(module: nn.Module) -> list[Any]:
    """Return a module's backward hooks and backward pre-hooks."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set a tensor's version, where its value is that of the version again."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # pyright: ignore[reportAttributeAccessIssue]


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return a module's forward hooks and forward pre-hooks."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def global_hooks() -> list[dict[int, Any]]:
    """Return what keeps the hooks that run at every module's call and backward."""
    forward = [module._global_forward_hooks, module._global_forward_pre_hooks]
    return [*forward, module._global_backward_hooks, module._global_backward_pre_hooks]


def global_forward_hooks() -> list[Any]:
    """Return the forward hooks and forward pre-hooks that run at every module's call."""
    return [*module._global_forward_hooks.values(), *module._global_forward_pre_hooks.values()]


@contextmanager
def marks_and_allocations() -> Iterator[list[Any]]:
    """Let torch.profiler see annotations and what the CPU's allocator does inside; the list then holds the raw events.

    Operators are left out: they are most of what torch.profiler sees otherwise, and of the time that it takes.
    """
    events: list[Any] = []
    session = _profiler.profile(profile_memory=True)
    _profiler._prepare_profiler(session.config(create_trace_id=True), session.kineto_activities)
    _profiler._run_on_profiler_start()
    _profiler._enable_profiler(session.config(), session.kineto_activities, {RecordScope.USER_SCOPE})
    try:
        yield events
    finally:
        events += _profiler._disable_profiler().events()
        _profiler._run_on_profiler_stop()


def kineto_events(profiler: Any) -> list[Any]:
    """Return the raw events of a finished torch.profiler session."""
    return list(profiler.profiler.kineto_results.events())


def ran_on_cpu(event: Any) -> bool:
    """Return whether a raw event happened on the CPU."""
    return event.device_type() == DeviceType.CPU


def is_annotation(event: Any) -> bool:
    """Return whether a raw event is a user's annotation (record_function), on the CPU or mirrored on a device."""
    return event.is_user_annotation()


def is_operator(event: Any) -> bool:
    """Return whether a raw event is an operator, whose number kernels are linked by, and no call of the driver's."""
    return event.activity_type() == "cpu_op" and not event.is_async()


@contextmanager
def fakes_take_foreach(*kinds: str) -> Iterator[None]:
    """Let optimizers, and clipping of gradients, treat fake tensors as they treat real ones.

    torch takes its foreach and fused paths by default where every parameter is exactly of a type on its list, on a
    device on another list. Fakes are on neither, so that their step would be a loop where the real one is not.

    Args:
        kinds: Kinds of device that have foreach kernels besides those that torch knows.
    """
    lists = _optimizers._foreach_supported_types, _foreach_utils._foreach_supported_types
    known = _optimizers._get_foreach_kernels_supported_devices
    for types in lists:
        types.append(FakeTensor)
    _optimizers._get_foreach_kernels_supported_devices = lambda: [*known(), *kinds]
    try:
        yield
    finally:
        _optimizers._get_foreach_kernels_supported_devices = known
        for types in lists:
            types.remove(FakeTensor)


def below_autocast() -> Any:
    """Return a context in which autocast does nothing to the CPU's tensors, as in the kernels of autocast itself."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


@contextmanager
def cuda_autocast_on_cpu() -> Iterator[None]:
    """Let `torch.autocast("cuda")` act on the CPU's tensors, with CUDA's default dtype."""
    kind = torch.amp.autocast_mode.autocast
    begin = kind.__init__

    def begin_on_cpu(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        begin(self, device_type, dtype, *args, **kwargs)

    kind.__init__ = begin_on_cpu
    try:
        yield
    finally:
        kind.__init__ = begin


def sdp_priority_order() -> list[str]:
    """Return the kinds of attention in the order in which torch asks whether they take its inputs."""
    names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
    return [names.get(int(number), "") for number in torch._C._get_sdp_priority_order()]


def composite(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run what torch itself makes a composite operator of, whatever was registered over it."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def cpu_autocasts(name: str) -> bool:
    """Return whether autocast on a CPU has a kernel for an operator of `aten`."""
    lines = torch._C._dispatch_dump_table(f"aten::{name}").splitlines()
    return any(line.startswith("AutocastCPU: registered") for line in lines)


def destroy(library: Any) -> None:
    """Take back what a library registered."""
    library._destroy()


def clear_cublas_workspaces() -> None:
    """Let cuBLAS give its workspaces back; nothing to do where torch was built without CUDA."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def default_cpu_stream() -> object:
    """Return the stream that the CPU's work is on unless a program enters another one; on a CPU they do nothing."""
    return torch.cpu._default_cpu_stream


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


@contextmanager
def resizes_told(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `tell` after every `UntypedStorage.resize_`, by which FSDP2 frees and makes room for gathered parameters."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        tell(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        # The method is inherited: what was put over it is taken away.
        del torch.UntypedStorage.resize_


@contextmanager
def data_parallel_on_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Let `DistributedDataParallel` be built of fake parameters: with fake buckets, and nothing is sent."""
    kind, of_ranks = DistributedDataParallel, ("_broadcast_coalesced", "_verify_params_across_processes")
    build, kept = kind._ddp_init_helper, {name: getattr(torch.distributed, name) for name in of_ranks}

    def build_of_fakes(self: Any, *args: Any, **kwargs: Any) -> None:
        with mode:
            build(self, *args, **kwargs)

    kind._ddp_init_helper = build_of_fakes
    for name in of_ranks:
        setattr(torch.distributed, name, _send_nothing)
    try:
        yield
    finally:
        kind._ddp_init_helper = build
        for name, value in kept.items():
            setattr(torch.distributed, name, value)


def _send_nothing(*_: Any) -> None:
    pass


_OF_THE_WORLD = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")


class _Unwatched:
    """Let no mode see what DTensor runs on fake tensors of its own to learn an operator's shapes."""

    def __init__(self) -> None:
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        self._entered.append(_disable_current_modes())
        self._entered[-1].__enter__()

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(*error)


@contextmanager
def private_process_group(ranks: int) -> Iterator[None]:
    """Be rank 0 of a group that communicates nothing; what the caller has initialised is out of the way meanwhile."""
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    known, hook, lock = set(_module_state_mapping.keys()), sys.excepthook, ShardingPropagator._fake_mode_lock
    kept = {
        name: getattr(c10d, name)
        for name in (*_OF_THE_WORLD, "_world", "_group_count", "_backend", "_default_pg_init_method")
    }
    for name in _OF_THE_WORLD:
        setattr(c10d, name, {})
    c10d._world = c10d._World()
    # Groups are registered by number in C++ as well, where those of the caller's stay.
    c10d._group_count = 1_000_000
    ShardingPropagator._fake_mode_lock = _Unwatched()
    try:
        c10d.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        yield
    finally:
        for name in list(c10d._pg_names.values()):
            c10d._unregister_process_group(name)
        for name, value in kept.items():
            setattr(c10d, name, value)
        ShardingPropagator._fake_mode_lock = lock
        # Each initialisation wraps the hook to name the rank.
        sys.excepthook = hook
        for module in set(_module_state_mapping.keys()) - known:
            state = _module_state_mapping.pop(module)()
            # Whoever looked at the model meanwhile may still have a hook, and by it all that was sharded.
            if state is not None:
                vars(state).clear()


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module's calls run what torch.compile made of it: `compile(module)` or `module.compile()`."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = frames is not None and isinstance(module, frames.OptimizedModule)
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None
