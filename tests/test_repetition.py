"""Which blocks of a model count as identical."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from remat.profiler.repetition import identical_blocks
from torch import nn
from transformers import AlbertConfig, AlbertModel, T5Config, T5Model


class Block(nn.Module):
    def __init__(self, number: int, width: int = 8) -> None:
        super().__init__()
        self.layer_idx = number
        self.inner = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.inner(x))


def stack(blocks: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ModuleList([Block(k) for k in range(blocks)]))


def test_blocks_that_differ_in_their_number_alone_are_identical() -> None:
    assert identical_blocks(stack()) == (tuple(f"1.{k}" for k in range(5)),)


def _less_dropout(block: Block) -> None:
    block.dropout.p = 0.2


def _number_of_its_own(block: Block) -> None:
    block.layer_idx = 7


def _other_width(block: Block) -> None:
    block.inner = nn.Linear(8, 8, bias=False)


def _frozen(block: Block) -> None:
    block.inner.weight.requires_grad_(False)


def _in_eval_mode(block: Block) -> None:
    block.dropout.eval()


def _other_forward(block: Block) -> None:
    block.forward = lambda x: x


def _hooked(block: Block) -> None:
    block.register_forward_hook(lambda *_: None)


def _gradient_hooked(block: Block) -> None:
    block.inner.weight.register_hook(lambda gradient: gradient)


def _more_inside(block: Block) -> None:
    block.dropout = nn.Sequential(block.dropout)


@pytest.mark.parametrize(
    "change",
    [
        _less_dropout,
        _number_of_its_own,
        _other_width,
        _frozen,
        _in_eval_mode,
        _other_forward,
        _hooked,
        _gradient_hooked,
        _more_inside,
    ],
)
def test_a_block_that_differs_ends_a_run(change: Callable[[Block], None]) -> None:
    model = stack()
    change(model[1][2])
    assert identical_blocks(model) == (("1.0", "1.1"), ("1.3", "1.4"))


def test_blocks_with_the_same_hook_are_identical() -> None:
    def hook(*_: object) -> None: ...

    model = stack()
    for block in model[1]:
        block.register_forward_hook(hook)
        block.inner.register_forward_hook(hook)
    assert [len(run) for run in identical_blocks(model)] == [5]


def test_blocks_that_share_a_tensor_or_a_module_are_identical_to_none() -> None:
    tied, shared, twice = stack(), stack(), stack()
    tied[1][1].inner.weight = tied[0].weight
    shared[1][1].dropout = shared[1][0].dropout
    twice[1].append(twice[1][4])
    assert identical_blocks(tied) == (("1.2", "1.3", "1.4"),)
    assert identical_blocks(shared) == (("1.2", "1.3", "1.4"),)
    assert identical_blocks(twice) == (("1.0", "1.1", "1.2", "1.3"),)


def test_lists_within_models_of_transformers_are_found() -> None:
    t5 = T5Model(T5Config(d_model=16, d_ff=16, d_kv=8, num_layers=4, num_heads=2, vocab_size=32))
    # The first block has the table of relative positions.
    assert [run[0] for run in identical_blocks(t5)] == ["encoder.block.1", "decoder.block.1"]
    albert = AlbertModel(AlbertConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2))
    assert identical_blocks(albert) == ()
