"""Steps recorded with most identical blocks left out: their records are those of the whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from remat.planner.applier.apply import apply_segments
from remat.planner.finding.dry_runs import _role
from remat.planner.segments import Call, PlannedSegment, SavedOperator
from remat.profiler import open_session, profile
from remat.profiler.contents import flat
from remat.profiler.dry_run import dry_run, record_step
from remat.profiler.internals import FakeTensor
from remat.profiler.repetition import identical_blocks
from remat.profiler.scratch import ScratchMeter
from remat.profiler.session import Session
from remat.profiler.shortened import FIRST, LAST, NotAlikeError, runs_of
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

BLOCKS = 8
IDS = torch.arange(12).view(2, 6)
TEXT = {"input_ids": IDS, "labels": IDS}
COMMON = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def gpt2(**settings: Any) -> nn.Module:
    config = GPT2Config(
        n_embd=16, n_head=2, n_layer=BLOCKS, vocab_size=32, use_cache=False, bos_token_id=0, eos_token_id=0, **settings
    )
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**COMMON, use_cache=False))


def whisper() -> nn.Module:
    return WhisperForConditionalGeneration(
        WhisperConfig(
            d_model=16,
            encoder_layers=BLOCKS,
            decoder_layers=BLOCKS,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_mel_bins=4,
            max_source_positions=8,
            vocab_size=32,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            decoder_start_token_id=1,
            use_cache=False,
        )
    )


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(d_model=16, d_ff=16, d_kv=8, num_layers=BLOCKS, num_heads=2, vocab_size=32, decoder_start_token_id=0)
    )


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.second(self.inner(self.first(self.norm(x)))))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


class Numbered(Block):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh().sin() if self.number == 4 else x.relu()


class Counting(Block):
    seen: int = 0

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x.relu()


class Stack(nn.Module):
    """Blocks in a loop that also does what `between` says after each."""

    def __init__(self, kind: type[Block] = Block, between: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList([kind(number) for number in range(BLOCKS + 2)])
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        kept: list[torch.Tensor] = []
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.between is not None:
                x = self.between(number, x, kept)
        return self.after(x + sum(kept)) if kept else self.after(x)


def hold_in(chosen: Callable[[int], bool], number: int, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    if chosen(number):
        kept.append(x)
    return x


def scaled(number: int, x: torch.Tensor, _: list[torch.Tensor]) -> torch.Tensor:
    return 2 * x if number == 4 else x


def other(stack: Stack, change: Callable[[nn.Module], None]) -> Stack:
    change(stack.layers[3])
    return stack


def with_more_dropout(block: Any) -> None:
    block.dropout.p = 0.5


def wider(block: Any) -> None:
    block.first, block.second = nn.Linear(8, 24), nn.Linear(24, 8)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


STACKED = torch.ones(3, 8)
SOUND = {"input_features": torch.ones(2, 4, 16), "labels": IDS}
EXACT: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    "GPT-2": (gpt2, TEXT, BLOCKS),
    "Llama": (llama, TEXT, BLOCKS),
    "Bert": (lambda: BertForMaskedLM(BertConfig(**COMMON)), TEXT, BLOCKS),
    "Whisper, two stacks": (whisper, SOUND, 2 * BLOCKS),
    "a stack": (Stack, STACKED, BLOCKS + 2),
    "a stack that holds the blocks' outputs no longer": (
        partial(Stack, between=partial(hold_in, lambda _: False)),
        STACKED,
        BLOCKS + 2,
    ),
}
WHOLE: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "all hidden states": (partial(gpt2, output_hidden_states=True), TEXT),
    "T5, which hands a position bias on": (t5, TEXT),
    "every output collected": (partial(Stack, between=partial(hold_in, lambda _: True)), STACKED),
    "one output collected": (partial(Stack, between=partial(hold_in, lambda number: number == 5)), STACKED),
    "the first outputs collected": (partial(Stack, between=partial(hold_in, lambda number: number < 3)), STACKED),
    "an operator between two blocks": (partial(Stack, between=scaled), STACKED),
    "blocks that count": (partial(Stack, Counting), STACKED),
}


def session_of(model: nn.Module, batch: Any, **options: Any) -> Session:
    loss = None if isinstance(batch, dict) else mean_square
    return open_session(model, batch, loss, **options)


def both(session: Session, segments: tuple[PlannedSegment, ...] = (), **options: Any) -> tuple[Any, Any, int]:
    """Return a step's whole record, the one that was written for left out blocks, and how many blocks are alike."""
    model = session.step.model
    identical = identical_blocks(model)
    role = partial(_role, segments) if segments else None
    options |= {"scratch": ScratchMeter(), "planned": bool(segments), "accumulation": session.accumulation}
    with apply_segments(model, segments), session.step.guard.undisturbed():
        whole = dry_run(session.step, **options)
        runs = runs_of(model, identical, role)
        return whole, dry_run(session.step, **options, runs=runs), sum(len(run.names) for run in runs)


@pytest.mark.parametrize("name", EXACT)
def test_the_record_with_blocks_left_out_is_that_of_the_whole_step(name: str) -> None:
    make, batch, blocks = EXACT[name]
    whole, short, alike = both(session_of(make(), batch))
    assert alike == blocks
    assert short == whole


@pytest.mark.parametrize("make", [gpt2, llama])
def test_so_is_that_of_a_forward_that_saves_nothing(make: Callable[[], nn.Module]) -> None:
    whole, short, alike = both(session_of(make(), TEXT), forward_only=True)
    assert alike == BLOCKS
    assert short == whole


@pytest.mark.parametrize("options", [{"accumulation": True}, {"holds_output": False}])
def test_it_is_so_with_accumulation_and_where_the_output_goes(options: dict[str, bool]) -> None:
    whole, short, alike = both(session_of(gpt2(), TEXT, **options))
    assert alike == BLOCKS
    assert short == whole


def test_it_is_so_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        whole, short, alike = both(session_of(gpt2(), TEXT))
    assert alike == BLOCKS
    assert short == whole


@pytest.mark.parametrize("name", WHOLE)
def test_blocks_that_are_not_one_chain_are_all_run(name: str) -> None:
    make, batch = WHOLE[name]
    session = session_of(make(), batch)
    with pytest.raises(NotAlikeError):
        both(session)
    recorded = session.record("dry run")
    assert not session.is_shortened
    session.shortens = False
    assert recorded == session.record("dry run")


@pytest.mark.parametrize("change", [with_more_dropout, wider])
def test_a_block_that_differs_is_run(change: Callable[[nn.Module], None]) -> None:
    whole, short, alike = both(session_of(other(Stack(), change), STACKED))
    assert alike == 0
    assert short == whole


def test_a_block_called_many_times_is_run_every_time() -> None:
    albert = AlbertForMaskedLM(AlbertConfig(**COMMON, embedding_size=8))
    whole, short, alike = both(session_of(albert, TEXT))
    assert alike == 0
    assert short == whole


@pytest.mark.parametrize("options", [{}, {"repeats": 0}, {"device": "h100-80gb"}])
def test_a_block_that_computes_something_else_by_its_number_is_found_out(options: dict[str, Any]) -> None:
    model = Stack(Numbered)
    found = profile(model, STACKED, loss=mean_square, **{"repeats": 2, **options})
    tanh = [found.calls[o.call].module for o in found.operators if o.operator == "aten.tanh.default"]
    assert tanh == ["layers.4"]


def test_a_profile_is_the_same_with_blocks_left_out_and_without() -> None:
    model = gpt2()
    sessions = [session_of(model, TEXT), session_of(model, TEXT)]
    sessions[1].shortens = False
    short, whole = (profile(model, TEXT, session=session, repeats=2) for session in sessions)
    assert sessions[0].is_shortened
    assert not sessions[1].is_shortened
    assert [replace(o, forward_ns=0) for o in short.operators] == [replace(o, forward_ns=0) for o in whole.operators]
    assert (short.storages, short.calls, short.parts) == (whole.storages, whole.calls, whole.parts)


def test_a_model_is_left_as_it_was() -> None:
    model = gpt2()
    before = {name: list(map(id, flat(vars(module)))) for name, module in model.named_modules()}
    session = session_of(model, TEXT)
    session.record("dry run")
    assert session.is_shortened
    assert {name: list(map(id, flat(vars(module)))) for name, module in model.named_modules()} == before


def test_what_blocks_left_out_hold_is_not_replaced_by_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fakes = Stack(), list[list[int]]()

    def looking(step: Any, **options: Any) -> Any:
        fakes.append([n for n, layer in enumerate(model.layers) if isinstance(layer.norm.weight, FakeTensor)])
        return record_step(step, **options)

    monkeypatch.setattr("remat.profiler.dry_run.record_step", looking)
    both(session_of(model, STACKED))
    both(session_of(model, STACKED, accumulation=True))
    every = list(range(BLOCKS + 2))
    assert fakes == [every, [*every[:FIRST], *every[-LAST:]], every, every]


def segment(*names: str, **parts: Any) -> PlannedSegment:
    return PlannedSegment(members=tuple(Call(module=name) for name in names), **parts)


def every(inner: str = "") -> tuple[PlannedSegment, ...]:
    return tuple(segment(f"transformer.h.{number}{inner}") for number in range(BLOCKS))


H = tuple(f"transformer.h.{number}" for number in range(BLOCKS))
KEPT_PRODUCT = (SavedOperator(operator="aten.addmm.default", index=1),)
PLANS: dict[str, tuple[tuple[PlannedSegment, ...], int]] = {
    "every block": (every(), BLOCKS),
    "inside every block": (every(".mlp"), BLOCKS),
    "every block, and inside it": (tuple(segment(h, children=(segment(f"{h}.mlp"),)) for h in H), BLOCKS),
    "every block with a save set": (tuple(segment(h, save=KEPT_PRODUCT) for h in H), BLOCKS),
    "one segment": ((segment(*H[:7]),), 7),
    "one segment, and every block in it": ((segment(*H[:7], children=tuple(map(segment, H[:7]))),), 7),
    "one segment with a save set": ((segment(*H[:7], save=KEPT_PRODUCT),), 0),
    "two segments": ((segment(*H[:4]), segment(*H[4:])), 0),
    "every second block": (tuple(map(segment, H[::2])), 0),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_record_of_a_planned_step_is_that_of_the_whole_one(name: str) -> None:
    segments, blocks = PLANS[name]
    whole, short, alike = both(session_of(gpt2(), TEXT), segments)
    assert alike == blocks
    assert short == whole


def test_the_record_of_one_segment_over_the_blocks_of_a_llama_is_that_of_the_whole_step() -> None:
    segments = (segment(*(f"model.layers.{number}" for number in range(BLOCKS))),)
    whole, short, alike = both(session_of(llama(), TEXT), segments)
    assert alike == BLOCKS
    assert short == whole
