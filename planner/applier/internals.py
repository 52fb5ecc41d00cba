"""The parts of torch the applier needs that are not public, in one place: an upgrade of torch has one file to check.

Last checked with torch 2.13. tests/test_apply_internals.py says what is relied on.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator
from operator import call, methodcaller
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_function_stack as _mode_count
from torch._C import _pop_torch_function_stack as _pop_mode
from torch._C import _push_on_torch_function_stack as _push_mode
from torch._C._autograd import _make_saved_tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd import forward_ad
from torch.backends import cuda
from torch.nn.modules import module as module_file
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

OPERATOR_TYPES = (OpOverload, HigherOrderOperator)
# What a module's __call__ looks up on the instance and calls, with all hooks inside.
CALL_METHOD = "_call_impl"
# What torch.nn.DataParallel calls on every module to copy it to another device.
REPLICATE_METHOD = "_replicate_for_data_parallel"
Hooks = tuple[Callable[..., Any], Callable[..., Any]]
# How torch ends a replay once it has all that backward needs.
StopReplay = checkpoint._StopRecomputationError
# Detaches a tensor in a dispatch mode so that the result can be handed out as an operator's output.
detached: Callable[[torch.Tensor], torch.Tensor] = checkpoint._detach_helper


def checkpoint_generator(
    function: Callable[..., Any],
    contexts: Callable[[], tuple[Any, Any]] | None,
    early_stop: bool,
    inputs: list[torch.Tensor],
) -> Generator[None, None, None]:
    """Return torch's non-reentrant checkpoint as a generator: the region is what runs between its two steps."""
    context_fn = contexts or checkpoint.noop_context_fn
    return checkpoint._checkpoint_without_reentrant_generator(
        function, True, context_fn, "default", False, early_stop, *inputs
    )


def tensors_saved_in_forward() -> list[Any]:
    """Return the list that grows with each tensor saved in the innermost region, just entered."""
    return _held_by_pack_hook()["frame"].weak_holders


class TorchReplay:
    """torch's innermost replay, just begun."""

    __slots__ = ("_frame", "_graph")

    def __init__(self) -> None:
        held = _held_by_pack_hook()
        self._frame = held["target_frame_ref"]()
        self._graph = held["gid"]

    @property
    def saved(self) -> int:
        """Return how many tensors were saved again so far."""
        return self._frame.recomp_counter[self._graph]

    def again(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Forget what was saved again so far and start from the beginning, random states and autocast included."""
        frame, graph = self._frame, self._graph
        frame.recomp_counter[graph] = 0
        frame.recomputed.pop(graph, None)
        for reference in frame.weak_holders:
            holder = reference()
            if holder is not None:
                holder.handles.pop(graph, None)
        frame.recompute_fn(*inputs)


def _held_by_pack_hook() -> dict[str, Any]:
    hooks = top_hooks()
    assert hooks is not None
    # Where the compiler is told to leave the hook alone, it is behind a wrapper.
    pack = inspect.unwrap(hooks[0])
    return {name: cell.cell_contents for name, cell in zip(pack.__code__.co_freevars, pack.__closure__, strict=True)}


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary a module keeps its own children in."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary a module keeps its own parameters in."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary a module keeps its own buffers in."""
    return module._buffers


def forward_hook_registries(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries a module keeps its forward hooks and forward pre-hooks in."""
    return module._forward_hooks, module._forward_pre_hooks


def global_hook_registries() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries of forward hooks and forward pre-hooks that run at every module's call."""
    return module_file._global_forward_hooks, module_file._global_forward_pre_hooks


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; a ModuleList cannot."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """Return how often each tensor was changed in place; 0 where torch does not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def checkpoint_debug_is_on() -> bool:
    """Return whether torch's checkpoints are told to log what they run, which needs contexts of its own."""
    return bool(checkpoint._checkpoint_debug_enabled)


def parametrizations_are_cached() -> bool:
    """Return whether parametrized weights are computed once and kept, as in `parametrize.cached()`."""
    return parametrize._cache_enabled > 0


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether a module's __call__ runs what `module.compile()` made, and no CALL_METHOD."""
    return module._compiled_call_impl is not None


def differentiated_by_function() -> bool:
    """Return whether a transform of torch.func is running, or derivatives are computed forward."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def next_node_number() -> int:
    """Return the sequence number that the next autograd node of this thread gets."""
    return torch._C._autograd._get_sequence_nr()


# An autograd node's sequence number.
node_number: Callable[[Any], int] = methodcaller("_sequence_nr")


def top_hooks() -> Hooks | None:
    """Return the innermost saved-tensor hooks in force; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def save_beneath(hooks: Hooks, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Save a tensor as if the given saved-tensor hooks, and those above them, were not in force.

    Returns:
        What gives the tensor back.
    """
    graph = torch._C._autograd
    removed: list[Hooks] = []
    try:
        while not removed or removed[-1][0] is not hooks[0]:
            hooks_on_top = top_hooks()
            assert hooks_on_top is not None
            removed.append(hooks_on_top)
            graph._pop_saved_tensors_default_hooks()
        return _make_saved_tensor(tensor, is_output=False).unpack
    finally:
        for pair in reversed(removed):
            graph._push_saved_tensors_default_hooks(*pair)


def function_mode_count() -> int:
    """Return how many torch function modes are in force."""
    return _mode_count()


def insert_function_mode(mode: TorchFunctionMode, height: int) -> None:
    """Put a torch function mode in force beneath all but the first `height` ones."""
    above: list[TorchFunctionMode] = []
    while _mode_count() > height:
        above.append(_pop_mode())
    _push_mode(mode)
    while above:
        _push_mode(above.pop())


def remove_function_mode(mode: TorchFunctionMode) -> bool:
    """Take a torch function mode out of force wherever it is; return whether it was there."""
    above: list[TorchFunctionMode] = []
    top = None
    while top is not mode and _mode_count():
        top = _pop_mode()
        if top is not mode:
            above.append(top)
    while above:
        _push_mode(above.pop())
    return top is mode


def ambient_settings() -> list[Any]:
    """Return the process-wide settings that change results and that torch does not bring back for a replay."""
    return list(map(call, _READ_AMBIENT))


def set_ambient(settings: list[Any]) -> None:
    """Bring back what `ambient_settings` returned."""
    for (_, bring_back), setting in zip(_AMBIENT, settings, strict=True):
        bring_back(setting)


# How each is read and set. The public readers are Python around these, and a region reads them twice.
_ANYWHERE: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_flash_sdp_enabled, cuda.enable_flash_sdp),
    (torch._C._get_math_sdp_enabled, cuda.enable_math_sdp),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_float32_matmul_precision, torch._C._set_float32_matmul_precision),
)
_ACCELERATOR_KIND = torch.accelerator.current_accelerator()
_KINDS = ("cpu",) if _ACCELERATOR_KIND is None else ("cpu", _ACCELERATOR_KIND.type)
_ACCELERATOR: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch._C._get_mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (torch._C._get_cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (torch._C._get_math_sdp_allow_fp16_bf16_reduction, torch._C._set_math_sdp_allow_fp16_bf16_reduction),
    (torch._C._get_cublas_allow_fp16_accumulation, torch._C._set_cublas_allow_fp16_accumulation),
    (
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda setting: torch._C._set_cublas_allow_fp16_reduced_precision_reduction(*setting),
    ),
    (
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda setting: torch._C._set_cublas_allow_bf16_reduced_precision_reduction(*setting),
    ),
)
_AMBIENT = _ANYWHERE + (_ACCELERATOR if _ACCELERATOR_KIND is not None else ())
_READ_AMBIENT = tuple(read for read, _ in _AMBIENT)


def in_ddp_forward() -> bool:
    """Return whether DistributedDataParallel's forward is running: it copies buffers in place before every one."""
    return nn.parallel.DistributedDataParallel._active_ddp_module is not None


def is_sharded(root: nn.Module) -> bool:
    """Return whether FSDP2 manages some of a model's parameters."""
    kinds = {base.__name__ for module in root.modules() for base in type(module).__mro__}
    return "FSDPModule" in kinds


# Whether autocast is on for any kind of device.
autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
Autocast = tuple[tuple[str, torch.dtype, bool], ...]


def autocast_state() -> Autocast:
    """Return kind of device, dtype and whether autocast is on, for the CPU and the accelerator."""
    return tuple([(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in _KINDS])


# Gives something true where torch.compile takes the frames that this thread runs; bound as it is, for the compiler
# would take a function of ours around it.
compiler_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback

uncompiled = torch._disable_dynamo


def eager_backend() -> str:
    """Return, in code that is being traced, the name of a backend that runs graphs without autograd's own tracing.

    Such backends replay a checkpoint with other random numbers than its forward drew, with or without a plan. Of any
    other backend the name is empty.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    name = getattr(backend, "__name__", "") or getattr(backend, "compiler_name", "")
    return name if name in ("eager", "eager_noexcept", "eager_debug") else ""


def warn_of_eager(where: str) -> None:
    """Warn, in code that is being traced, of what `eager_backend` told of."""
    warnings.warn(
        f"segment {where}: torch.compile(backend={eager_backend()!r}) replays a checkpoint with other random numbers "
        "than its forward drew, so gradients are wrong where it has dropout; use backend='aot_eager' or the default "
        "one",
        stacklevel=2,
    )


def warn_of_nested(where: str) -> None:
    """Warn, in code that is being traced, that the compiler makes one checkpoint of those inside one another."""
    warnings.warn(
        f"segment {where} has others inside, and of those torch.compile takes the outermost alone: it is exact, but "
        "its peak may be above the promised one; plan with solver='dp' or 'ilp', which put no segment inside another",
        stacklevel=2,
    )


# What torch.compiler.assume_constant_result does, which would import the compiler: the function runs while tracing.
eager_backend.__dict__["_dynamo_marked_constant"] = True
warn_of_eager.__dict__["_dynamo_marked_constant"] = True
warn_of_nested.__dict__["_dynamo_marked_constant"] = True
