"""Record a step on the CPU as a named card would run it: its attention, dropout, normalisations, autocast, optimizer.

Fake tensors stay on the CPU, whose kernels are never reached; what a composite operator is made of is chosen anew, by
torch's own rules for the card. Left as on the CPU: recurrent layers, `torch.rms_norm` (in pieces, which keep more than
the card's one kernel), single operators that are not composite, and whatever Python code decides by `tensor.is_cuda` or
`torch.cuda.is_available()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.backends import cuda, cudnn
from torch.library import Library
from torch.utils import _pytree as pytree

from .cards import Card
from .internals import (
    FakeTensor,
    below_autocast,
    composite,
    cpu_autocasts,
    cuda_autocast_on_cpu,
    destroy,
    fakes_take_foreach,
    sdp_priority_order,
)

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
FLASH_HEAD = 256
"""Largest head that flash attention takes."""

# What autocast runs in float32 on CUDA and leaves alone on a CPU (torch/include/ATen/autocast_mode.h, AT_FORALL_FP32),
# of what models use; and what it asks for a float32 result of (AT_FORALL_FP32_SET_OPT_DTYPE).
_IN_FLOAT32 = (
    *("exp", "log", "log10", "log2", "log1p", "expm1", "reciprocal", "rsqrt", "softplus"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "layer_norm", "rms_norm", "group_norm"),
    *("cosine_similarity", "kl_div", "l1_loss", "logsumexp", "binary_cross_entropy_with_logits"),
    *("upsample_nearest2d", "upsample_nearest2d.vec", "upsample_bilinear2d", "upsample_bilinear2d.vec"),
)
_GIVES_FLOAT32 = (
    "softmax.int",
    "log_softmax.int",
    "sum",
    "sum.dim_IntList",
    "prod",
    "prod.dim_int",
    "cumsum",
    "cumprod",
)


@contextmanager
def recorded_as(card: Card) -> Iterator[None]:
    """Let fake tensors on the CPU take a card's operators while inside; in the whole process, not in one thread.

    Real tensors keep the CPU's operators, but autocast's casts are the card's for them too. `torch.autocast("cuda")`
    acts on the CPU's tensors meanwhile.

    Args:
        card: The card, whose compute capability decides.
    """
    choose = _Choices(card)
    chosen = {
        "scaled_dot_product_attention": choose.attention,
        "dropout": choose.dropout,
        "softmax.int": _from_half(_aten.softmax.int, _aten._softmax.default),
        "log_softmax.int": _from_half(_aten.log_softmax.int, _aten._log_softmax.default),
        "batch_norm": choose.batch_norm,
    }
    with ExitStack() as stack:
        stack.enter_context(fakes_take_foreach("cpu"))
        stack.enter_context(cuda_autocast_on_cpu())
        library = Library("aten", "IMPL")
        stack.callback(destroy, library)
        for name, function in chosen.items():
            library.impl(name, function, "AutogradCPU")
        for name in (name for name in _IN_FLOAT32 if not cpu_autocasts(name)):
            library.impl(name, _in_float32(_operator(name)), "AutocastCPU")
        for name in (name for name in _GIVES_FLOAT32 if not cpu_autocasts(name)):
            library.impl(name, _gives_float32(_operator(name)), "AutocastCPU")
        yield


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


def _castable(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _in_float32(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with below_autocast():
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: t.float() if _castable(t) else t, (args, kwargs)
            )
            return operator(*args, **kwargs)

    return run


def _gives_float32(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        with below_autocast():
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if given.get("dtype") is None and _castable(args[0]):
                given["dtype"] = torch.float32
            positional = [given.pop(name) for name in names[: len(args)] if name != "dtype"]
            if "dtype" in names[: len(args)]:
                positional.append(given.pop("dtype"))
            return operator(*positional, **given)

    return run


def _from_half(operator: Any, fused: Any) -> Callable[..., Any]:
    """Let softmax read float16 and write float32 in one kernel, as CUDA's does (bfloat16 is converted before)."""

    def run(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if isinstance(x, FakeTensor) and x.dtype == torch.float16 and dtype == torch.float32:
            return fused(x, dim, True)
        return composite(operator, x, dim, dtype)

    return run


class _Choices:
    """Choose what composite operators are made of on a card."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if isinstance(x, FakeTensor) and train and 0 < p < 1 and x.numel() > 0:
            return _aten.native_dropout.default(x, p, train)[0]
        return composite(_aten.dropout.default, x, p, train)

    def batch_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        enabled: bool,
    ) -> torch.Tensor:
        complete = weight is not None and bias is not None and (training or mean is not None)
        if isinstance(x, FakeTensor) and enabled and cudnn.enabled and complete and training and x.dim() > 2:
            return _aten.cudnn_batch_norm.default(x, weight, bias, mean, variance, training, momentum, eps)[0]
        args = (x, weight, bias, mean, variance, training, momentum, eps, enabled)
        return composite(_aten.batch_norm.default, *args)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        inputs = (query, key, value)
        if not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            return composite(
                _aten.scaled_dot_product_attention.default, *inputs, attn_mask, dropout_p, is_causal, **options
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        kind = self.backend(*inputs, attn_mask, is_causal, enable_gqa)
        if kind == "flash":
            return _flash(*inputs, dropout_p, is_causal, scale)
        if kind == "efficient":
            needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
            mask = None if attn_mask is None else _expanded(attn_mask, query, key)
            return _aten._scaled_dot_product_efficient_attention.default(
                *inputs, mask, needed, dropout_p, is_causal, scale=scale
            )[0]
        return _aten._scaled_dot_product_attention_math.default(
            *inputs, attn_mask, dropout_p, is_causal, None, **options
        )[0]

    def backend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        grouped: bool,
    ) -> str:
        """Return "flash", "efficient" or "math": the first in torch's order that is on and takes these inputs."""
        for name in sdp_priority_order():
            if name == "flash" and cuda.flash_sdp_enabled() and self._takes_flash(query, key, value, mask, is_causal):
                return name
            if name == "efficient" and cuda.mem_efficient_sdp_enabled():
                if not grouped and self._takes_efficient(query, key, value):
                    return name
            elif name == "math" and cuda.math_sdp_enabled():
                return name
        return "math"

    def _takes_flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> bool:
        same = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1] == value.shape[-1]
        square = not is_causal or query.shape[-2] == key.shape[-2]
        small = query.shape[-1] <= FLASH_HEAD
        return (
            self._card.capability >= (8, 0)
            and query.dtype in _HALF
            and mask is None
            and query.dim() == 4
            and same
            and square
            and small
        )

    def _takes_efficient(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        dtypes = (torch.float32, *_HALF) if self._card.capability >= (8, 0) else (torch.float32, torch.float16)
        same = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1]
        # Rows are read in pieces of 16 bytes.
        aligned = all(tensor.shape[-1] * tensor.element_size() % 16 == 0 for tensor in (query, value))
        return query.dtype in dtypes and query.dim() == 4 and same and aligned


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Run flash attention; heads are padded to a multiple of eight before, and cut afterwards."""
    head = query.shape[-1]
    scale = head**-0.5 if scale is None else scale
    missing = -head % 8
    if missing:
        query, key, value = (torch.nn.functional.pad(tensor, (0, missing)) for tensor in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention.default(query, key, value, p, is_causal, False, scale=scale)[0]
    return out[..., :head] if missing else out


def _expanded(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Expand an additive mask to all heads; rows are padded to a multiple of sixteen before, and the view cut."""
    length = mask.shape[-1]
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, -length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
