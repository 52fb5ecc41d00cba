"""The models of published runs, on meta, as those runs had them: precision, loss, checkpointing, LoRA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from llama import LLAMA_3_3B, Llama, Shape
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Built = tuple[nn.Module, Any, Callable[[Any], torch.Tensor] | None]
aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
}
"""What torchtitan's selective policy keeps, every second product left out."""


class FloatLogits(nn.Module):
    """A model whose forward ends in `.float()`, so that logits are held in 32 bits through backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def layers(self) -> nn.ModuleList:
        """Return the blocks."""
        return self.model.layers

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits in 32 bits."""
        return self.model(tokens).float()


class ChunkedLogits(Llama):
    """A Llama that returns its logits in pieces along the sequence."""

    size: int

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return pieces of logits."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotation)
        return [self.output(piece) for piece in self.norm(x).split(self.size, dim=1)]


class FloatNorm(nn.Module):
    """RMSNorm in 32 bits, piece by piece."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


class WithLora(nn.Module):
    """A frozen linear layer and LoRA of rank eight with dropout beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.dropout = linear, nn.Dropout(0.05)
        kind = {"device": "meta", "dtype": linear.weight.dtype}
        self.a = nn.Linear(linear.in_features, 8, bias=False, **kind)
        self.b = nn.Linear(8, linear.out_features, bias=False, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both."""
        return self.linear(x) + 2.0 * self.b(self.a(self.dropout(x)))


def on_meta(kind: type[Llama], shape: Shape, length: int, dtype: torch.dtype, *, repeat: bool) -> Llama:
    """Build a Llama on meta; the table of rotations stays as it is whatever the dtype."""
    with torch.device("meta"):
        model = kind(shape, length=length, repeat=repeat)
    rotation = model.rotation
    model = model.to(dtype)
    model.rotation = rotation
    return model


def in_float(tokens: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Return cross-entropy in 32 bits."""
    return lambda out: F.cross_entropy(out.flatten(0, 1).float(), tokens.flatten())


def llama(shape: Shape, batch: int, length: int, dtype: torch.dtype, *, float_logits: bool = False) -> Built:
    """Build torchtitan's Llama."""
    model: nn.Module = on_meta(Llama, shape, length, dtype, repeat=True)
    if float_logits:
        model = FloatLogits(model)
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return model, tokens, in_float(tokens)


def three(*, chunks: int) -> Built:
    """Build torchtune's Llama 3.2 3B, tied, in bf16, its logits in chunks."""
    tokens = torch.zeros(2, 4096, dtype=torch.long)
    model = on_meta(ChunkedLogits if chunks > 1 else Llama, LLAMA_3_3B, 4096, torch.bfloat16, repeat=True)
    model.output.weight = model.tok_embeddings.weight
    if chunks == 1:
        return model, tokens, in_float(tokens)
    model.size = 4096 // chunks

    def loss(pieces: list[torch.Tensor]) -> torch.Tensor:
        targets = tokens.split(4096 // chunks, dim=1)
        each = (
            F.cross_entropy(piece.flatten(0, 1).float(), target.flatten(), reduction="sum")
            for piece, target in zip(pieces, targets, strict=True)
        )
        return torch.stack(list(each)).sum() / tokens.numel()

    return model, tokens, loss


def lora(shape: Shape, batch: int, length: int) -> Built:
    """Build a frozen Llama with LoRA on queries and values, its logits in pieces of 128 tokens, as litgpt trains it."""
    model = on_meta(ChunkedLogits, shape, length, torch.bfloat16, repeat=False)
    model.size = 128
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    for layer in model.layers:
        layer.attention.wq, layer.attention.wv = WithLora(layer.attention.wq), WithLora(layer.attention.wv)
        layer.attention_norm, layer.ffn_norm = FloatNorm(layer.attention_norm.weight), FloatNorm(layer.ffn_norm.weight)
    model.norm = FloatNorm(model.norm.weight)
    tokens = torch.zeros(batch, length, dtype=torch.long)

    def loss(pieces: list[torch.Tensor]) -> torch.Tensor:
        targets = tokens.split(128, dim=1)
        each = [
            F.cross_entropy(piece.flatten(0, 1), target.flatten(), reduction="none")
            for piece, target in zip(pieces, targets, strict=True)
        ]
        return torch.cat(each).mean()

    return model, tokens, loss


def bert(batch: int) -> Built:
    """Build transformers' bert-large for classification, with plain attention."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = BertForSequenceClassification(config).train()
    ids = torch.zeros(batch, 512, dtype=torch.long)
    return model, {"input_ids": ids, "labels": torch.zeros(batch, dtype=torch.long)}, None


def checkpointed(model: nn.Module, how: str) -> None:
    """Write a run's own checkpointing into its blocks."""
    layers = list(model.bert.encoder.layer if hasattr(model, "bert") else model.layers)
    chosen = {"none": [], "every second layer": layers[1::2]}.get(how, layers)
    for layer in chosen:
        options = {"context_fn": _selective} if how == "selective" else {}
        forward = layer.forward
        layer.forward = lambda *args, _forward=forward, _options=options, **kwargs: checkpoint(
            _forward, *args, use_reentrant=False, **_options, **kwargs
        )


def _selective() -> Any:
    counts = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
