"""Decide before there is a machine: a model on meta, a named card, the number of ranks; one page of predictions.

Nothing is run or allocated, so the model may be of any size; this one is small for the sake of a short example.
"""

import torch
from remat.planner import answer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

RANKS = 8


class Block(nn.Module):
    """A block as transformers have it, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the two layers compute."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    with torch.device("meta"):
        head = nn.Linear(4096, 32_000, bias=False)
        model = nn.Sequential(nn.Embedding(32_000, 4096), *(Block(4096) for _ in range(8)), head)
    tokens = torch.zeros(4, 8192, dtype=torch.long)
    page = answer(
        model,
        tokens,
        budget="16GiB",
        solver="dp",
        loss=lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()),
        optimizer="adamw",
        device="h100-80gb",
        ranks=RANKS,
        units=model[1:-1],
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        holds_output=False,
    )
    print(page)


if __name__ == "__main__":
    main()
