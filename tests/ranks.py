"""Run a function in the processes of one gloo group; a block and a loss for tests that do."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

RANKS = 2


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def on_every_rank(body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `body(rank, *arguments)` returns in each process of a gloo group, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (Path(folder), body, arguments), nprocs=RANKS)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(RANKS)]


def work(rank: int, folder: Path, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    try:
        answer = body(rank, *arguments)
    finally:
        dist.destroy_process_group()
    (folder / str(rank)).write_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    # torch's own tables (default arguments of torch.distributed.nn, caches of DTensor) keep a destroyed group and its
    # threads alive. On a busy machine such a thread may drop its last tensor while the interpreter goes down, and the
    # process aborts with "terminate called without an active exception": so the interpreter is not taken down.
    os._exit(0)
