"""A model small enough to compare solvers on in seconds, planned once for all tests that look at the outcome."""

from functools import cache

import torch
from remat.planner.compare import Comparison, compare
from torch import nn

BUDGETS = ("90%", "60%", 1000)
SOLVERS = ("sqrt", "dp")


class Block(nn.Module):
    """A residual block whose activation function holds most of its memory."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def squares(output):
    return output.square().mean()


def build(batch=512, blocks=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).train(), torch.randn(batch, 32), squares


@cache
def small_comparison() -> Comparison:
    model, batch, loss = build()
    return compare(model, batch, budgets=BUDGETS, solvers=SOLVERS, loss=loss, optimizer="adamw", time_limit_s=10)
