"""Hold predictions against what others published of their runs: memory per card, and the gain of checkpointing less.

Every model is on meta and nothing is run. The run's own checkpointing is written into the model by torch's functions,
as the run did it; its step is recorded on fake tensors as one rank's, and its operators priced by roofline.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from llama import LLAMA_2_7B, LLAMA_3_3B, LLAMA_3_8B, Llama, Shape
from remat.profiler.cards import card
from remat.profiler.dry_run import dry_run
from remat.profiler.optimizer import optimizer_bytes
from remat.profiler.ranks import Ranks, by_fully_shard
from remat.profiler.roofline import Efficiency, predicted_ns
from remat.profiler.step import Step
from tables import Table, publish
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

GIB = 2**30
aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    # What attention is called where it is recorded.
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What torchtitan's selective policy keeps, every second product left out."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Describe one published run.

    Attributes:
        name: What was run.
        source: Where it is published.
        published_gib: The figure, GiB per card.
        of: Which figure it is.
        build: Makes the model and the step's arguments, on meta.
        ranks: Cards that FSDP2 divides it over; 1 without.
        checkpointed: "full", "selective" (torchtitan's, by operator) or "none".
        card: The card.
        extra_gib: What that figure holds besides, as published (a context).
        tokens_per_second: Published, per card.
        not_modelled: What the run does that the prediction does not know.
    """

    name: str
    source: str
    published_gib: float
    of: str
    build: Callable[[], tuple[nn.Module, Any, Callable[[Any], torch.Tensor] | None]]
    ranks: int = 1
    checkpointed: str = "none"
    card: str = "h100-96gb-hbm2e"
    accumulation: bool = False
    holds_output: bool = True
    extra_gib: float = 0.0
    tokens_per_second: float | None = None
    not_modelled: str = field(default="what the caching allocator reserves beyond what is allocated")


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


def llama(
    shape: Shape, batch: int, length: int, dtype: torch.dtype, *, tied: bool = False, float_logits: bool = False
) -> tuple[nn.Module, Any, Callable[[Any], torch.Tensor]]:
    with torch.device("meta"):
        model: nn.Module = Llama(shape, length=length, repeat=True)
    rotation = model.rotation
    model = model.to(dtype)
    model.rotation = rotation
    if tied:
        model.output.weight = model.tok_embeddings.weight
    if float_logits:
        model = FloatLogits(model)
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return model, tokens, lambda out: F.cross_entropy(out.flatten(0, 1).float(), tokens.flatten())


def bert(batch: int) -> tuple[nn.Module, Any, None]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = BertForSequenceClassification(config).train()
    ids = torch.zeros(batch, 512, dtype=torch.long)
    return model, {"input_ids": ids, "labels": torch.zeros(batch, dtype=torch.long)}, None


def checkpointed(model: nn.Module, how: str) -> None:
    """Write a run's own checkpointing into its blocks."""
    layers = model.bert.encoder.layer if hasattr(model, "bert") else model.layers
    for layer in layers if how != "none" else ():
        options = {} if how == "full" else {"context_fn": _selective}
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


def predicted(run: Run) -> tuple[int, float]:
    """Return the most bytes allocated on a card, and nanoseconds of forward and backward."""
    model, batch, loss = run.build()
    checkpointed(model, run.checkpointed)
    step = Step.of(model, batch, loss, holds_output=run.holds_output)
    ranks = None
    if run.ranks > 1:
        layers = {id(layer) for layer in model.layers}
        units = [name for name, module in model.named_modules() if id(module) in layers]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        ranks = Ranks(count=run.ranks, parallelize=by_fully_shard(units, policy=policy), words="")
    record = dry_run(step, accumulation=run.accumulation, round_to=512, planned=True, ranks=ranks)
    state, temporaries = optimizer_bytes(step, "adamw", round_to=512, ranks=ranks)
    held = record.entry_bytes() + state + temporaries
    held += 0 if run.accumulation else record.total_bytes("gradient")
    ns = sum(predicted_ns(operator, card(run.card), Efficiency()) for operator in record.operators)
    return max(record.peak_bytes() + state, held), ns


TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
EARLY = "torchtitan, commit 83c879f18"
TUNE = 'torchtune README, "Optimization flags"'
BERT = "transformers, perf_train_gpu_one"
F32, BF16 = torch.float32, torch.bfloat16
SEVEN = Run(
    name="Llama 2 7B, FSDP2 8, eager, 8 x 2048, full",
    source=EARLY,
    published_gib=22.73,
    of="allocated",
    build=lambda: llama(LLAMA_2_7B, 8, 2048, F32, float_logits=True),
    ranks=8,
    checkpointed="full",
    not_modelled="",
)
EIGHT = Run(
    name="Llama 3.1 8B, FSDP2 8, eager, 2 x 8192, selective",
    source=TITAN,
    published_gib=82.4,
    of="reserved",
    build=lambda: llama(LLAMA_3_8B, 2, 8192, F32),
    ranks=8,
    checkpointed="selective",
    holds_output=False,
)
THREE = Run(
    name="Llama 3.2 3B, one A100, bf16, 2 x 4096, none",
    source=TUNE,
    published_gib=60.0,
    of="allocated",
    build=lambda: llama(LLAMA_3_3B, 2, 4096, BF16, tied=True),
    card="a100-80gb",
    not_modelled="packed sequences' mask",
)
LARGE = Run(
    name="bert-large, one V100, fp32, 4 x 512, none",
    source=BERT,
    published_gib=14949 / 1024,
    of="nvidia-smi",
    build=lambda: bert(4),
    card="v100-16gb",
    extra_gib=1343 / 1024,
)
RUNS = (
    SEVEN,
    replace(SEVEN, name="the same", published_gib=31.02, of="reserved", not_modelled=EIGHT.not_modelled),
    replace(SEVEN, name="the same, selective", published_gib=49.54, checkpointed="selective"),
    replace(
        SEVEN,
        name="the same, selective",
        published_gib=59.41,
        of="reserved",
        checkpointed="selective",
        not_modelled=EIGHT.not_modelled,
    ),
    EIGHT,
    replace(EIGHT, name="the same, 128 cards", published_gib=67.0, ranks=128),
    replace(
        EIGHT,
        name="Llama 3 8B, FSDP2 8, 1 x 8192, selective",
        source="torchtitan, commit cf4423bc3",
        published_gib=52.4,
        build=lambda: llama(LLAMA_3_8B, 1, 8192, F32),
    ),
    replace(
        EIGHT,
        name="the same, full",
        source="torchtitan, commit cf4423bc3",
        published_gib=32.1,
        build=lambda: llama(LLAMA_3_8B, 1, 8192, F32),
        checkpointed="full",
    ),
    THREE,
    LARGE,
    replace(
        LARGE,
        name="the same, 1 x 512, accumulating 4",
        published_gib=8681 / 1024,
        build=lambda: bert(1),
        accumulation=True,
    ),
    replace(
        LARGE,
        name="the same, 1 x 512, accumulating 4, full",
        published_gib=6775 / 1024,
        build=lambda: bert(1),
        accumulation=True,
        checkpointed="full",
    ),
)
PAIRS = (
    ("Llama 2 7B, FSDP2 8, eager: full to selective", SEVEN, replace(SEVEN, checkpointed="selective"), 0.081),
    (
        "Llama 3 8B, FSDP2 8: full to selective",
        replace(RUNS[6], checkpointed="full"),
        RUNS[6],
        0.126,
    ),
    ("Llama 3.2 3B, one A100: full to none", replace(THREE, checkpointed="full"), THREE, 0.27),
    ("bert-large, one V100, 1 x 512: full to none", RUNS[11], RUNS[10], 0.29),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    out: Path = parser.parse_args().out
    started = time.process_time()
    known: dict[tuple[object, ...], tuple[int, float]] = {}

    def of(run: Run) -> tuple[int, float]:
        key = (run.build, run.ranks, run.checkpointed, run.accumulation, run.holds_output, run.card)
        if key not in known:
            known[key] = predicted(run)
        return known[key]

    rows = []
    for run in RUNS:
        gib = of(run)[0] / GIB + run.extra_gib
        rows.append(
            {
                "run": run.name,
                "source": run.source,
                "figure": run.of,
                "published GiB": round(run.published_gib, 2),
                "predicted GiB": round(gib, 2),
                "difference, %": round(100 * (gib / run.published_gib - 1), 1),
                "not modelled": run.not_modelled,
            }
        )
        print(rows[-1], flush=True)
    pairs = []
    for name, slow, fast, published in PAIRS:
        gain = of(slow)[1] / of(fast)[1] - 1
        pairs.append({"pair": name, "published gain, %": 100 * published, "predicted gain, %": round(100 * gain, 1)})
        print(pairs[-1], flush=True)
    cpu = f"{time.process_time() - started:.0f} CPU seconds altogether."
    memory = Table(
        name="published",
        title="Memory per card: published, and predicted without the card",
        rows=rows,
        notes=(
            "Predicted is what is allocated; where reserved memory was published, the difference holds the slack.",
            cpu,
        ),
    )
    speed = Table(
        name="published_pairs",
        title="Tokens per second gained by checkpointing less: published, and predicted by roofline",
        rows=pairs,
        notes=("Nothing is calibrated. Communication is left out.",),
    )
    publish("published", [memory, speed], out)


if __name__ == "__main__":
    main()
