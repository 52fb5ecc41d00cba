"""Plan models of the size people train, on meta, for cards that are not there: seconds, host memory and the answer.

Each model has a process of its own, so that its peak of host memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llama import LLAMA_3_8B, LLAMA_3_70B, Shape
from models import UNet, mean_square
from published_models import llama
from remat.planner import answer
from tables import Table, publish
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Case:
    """Say what is planned, and for what.

    Attributes:
        words: What, for the table.
        build: Makes model, batch, loss and what else `plan` is told, on meta.
        budget: For each card.
        ranks: Cards.
    """

    words: str
    build: Callable[[], tuple[nn.Module, Any, Any, dict[str, Any]]]
    budget: str = "72GiB"
    ranks: int = 1
    card: str = "h100-80gb"
    options: dict[str, Any] = field(default_factory=dict)


def shaped(shape: Shape, batch: int) -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    model, tokens, loss = llama(shape, batch, 8192, torch.float32)
    return model, tokens, loss, sharded(model.layers)


def sharded(units: Any) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {"units": list(units), "mp_policy": policy, "holds_output": False}


def of_transformers(kind: str, config: Any, batch: int, length: int) -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, kind)(config).train()
    ids = torch.zeros(batch, length, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}, None, sharded(model.model.layers)


def qwen() -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    return of_transformers("Qwen3ForCausalLM", config, 2, 4096)


def mixtral() -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    from transformers import MixtralConfig

    config = MixtralConfig()
    config._experts_implementation = "grouped_mm"
    model, batch, loss, options = of_transformers("MixtralForCausalLM", config, 2, 4096)
    policy = options.pop("mp_policy")

    def parallelize(model: nn.Module, mesh: Any) -> None:
        # FSDP2 divides the first dimension, and there are fewer experts than ranks.
        how = {"mesh": mesh, "mp_policy": policy}
        for layer in model.model.layers:
            fully_shard(layer, shard_placement_fn=lambda p: Shard(1) if p.dim() == 3 else None, **how)
        fully_shard(model, **how)

    return model, batch, loss, {**options, "parallelize": parallelize}


def unet() -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    with torch.device("meta"):
        model, images = UNet(channels=320, depth=4), torch.empty(16, 3, 512, 512)
    return model.bfloat16(), images.bfloat16(), mean_square, {}


def vit() -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1280,
        num_hidden_layers=32,
        num_attention_heads=16,
        intermediate_size=5120,
        image_size=1024,
        patch_size=14,
    )
    with torch.device("meta"):
        model = ViTForImageClassification(config).train().bfloat16()
        images = torch.empty(8, 3, 1024, 1024, dtype=torch.bfloat16)
    return model, {"pixel_values": images, "labels": torch.zeros(8, dtype=torch.long)}, None, {}


CASES = {
    "llama-70b": Case(
        words="Llama 70B (80 blocks), sequence 8192, batch 1", build=lambda: shaped(LLAMA_3_70B, 1), ranks=64
    ),
    "llama-8b": Case(
        words="Llama 8B (32 blocks), sequence 8192, batch 2", build=lambda: shaped(LLAMA_3_8B, 2), ranks=8
    ),
    "mixtral": Case(
        words="transformers' Mixtral 8x7B, experts sharded by rows, sequence 4096, batch 2", build=mixtral, ranks=32
    ),
    "qwen": Case(words="transformers' Qwen3 8B, sequence 4096, batch 2", build=qwen, ranks=8),
    "unet": Case(words="U-Net, 320 to 2560 channels, 16 images at 512, bf16", build=unet, budget="60GiB"),
    "vit": Case(words="transformers' ViT-H, 8 images at 1024 (5,329 tokens), bf16", build=vit, budget="40GiB"),
}


def planned(name: str) -> dict[str, Any]:
    """Plan one case here, and say what it took."""
    case = CASES[name]
    model, batch, loss, options = case.build()
    options = {**options, "device": case.card, "ranks": case.ranks, "optimizer": "adamw", "loss": loss}
    started = time.process_time()
    found = answer(model, batch, case.budget, solver="dp", time_limit_s=60, **options)
    seconds = time.process_time() - started
    unit, plan = found.counted[1], found.plan
    row = {
        "model": case.words,
        "ranks": case.ranks,
        "budget": case.budget,
        "CPU s": round(seconds),
        "host GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "without a plan GiB": round((plan.unplanned_peak_bytes or 0) / GIB, 1),
        "fits": found.fits,
        "peak GiB": round((plan.predicted_peak_bytes or 0) / GIB, 1),
        "segments": len(plan.segments),
        "added time, %": round(100 * (plan.predicted_overhead or 0), 1),
        f"predicted {unit}/s a card": round(found.per_second, 1 if unit == "samples" else None),
    }
    return {"row": row, "page": str(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", choices=CASES, help="plan this one here and print its page")
    parser.add_argument("--json", action="store_true", help="with --only: print as JSON")
    given = parser.parse_args()
    if given.only:
        found = planned(given.only)
        print(json.dumps(found) if given.json else f"{found['page']}\n\n{found['row']}")
        return
    rows, pages = [], []
    for name in CASES:
        command = [sys.executable, __file__, "--only", name, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            rows.append({"model": CASES[name].words, "fits": "", "failed": done.stderr.strip().splitlines()[-1]})
        else:
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append(found["row"])
            pages.append(found["page"])
        print(rows[-1], flush=True)
    table = Table(
        name="at_scale",
        title="Models on meta, planned for cards that are not there: all but the seconds and the host is predicted",
        rows=rows,
        notes=("AdamW, `dp`. CPU seconds hold everything from the model on meta to the answer.",),
    )
    publish("at_scale", [table], given.out, verb="Predicted")
    with (given.out / "at_scale.md").open("a") as file:
        file.write(
            "\n" + "\n\n".join(page.replace("\n## ", "\n#### ").replace("# ", "### ", 1) for page in pages) + "\n"
        )


if __name__ == "__main__":
    main()
