"""A step recorded for a card takes the card's operators; what that changes in bytes is explained one by one."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from remat.profiler.cards import card
from remat.profiler.dry_run import DryRunError, dry_run
from remat.profiler.recorded_as import recorded_as
from remat.profiler.step import Step
from torch import nn
from torch.nn import functional

A100, V100 = card("a100-40gb"), card("v100-16gb")
FLASH, EFFICIENT = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
)
ON_CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def operators(model, batch, at=A100, context=nullcontext):
    model.requires_grad_(True)
    with recorded_as(at) if at is not None else nullcontext(), context():
        return dry_run(Step.of(model, batch))


def names(record):
    return Counter(operator.operator for operator in record.operators)


class Attention(nn.Module):
    """Attention of four heads, with or without a mask."""

    def __init__(self, width=64, *, masked=False, causal=False, dropout=0.0, grouped=False):
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.masked, self.causal, self.dropout, self.grouped = masked, causal, dropout, grouped

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.grouped:
            k, v = k[:, :2], v[:, :2]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.masked else None
        return functional.scaled_dot_product_attention(
            q, k, v, mask, self.dropout, self.causal, enable_gqa=self.grouped
        )


def batch(dtype=torch.bfloat16, width=64, length=48):
    return torch.randn(2, length, width, dtype=dtype)


@pytest.mark.parametrize(
    ("at", "dtype", "options", "expected"),
    [
        (A100, torch.bfloat16, {}, FLASH),
        (A100, torch.bfloat16, {"causal": True, "dropout": 0.1}, FLASH),
        (A100, torch.bfloat16, {"grouped": True}, FLASH),
        (A100, torch.bfloat16, {"masked": True}, EFFICIENT),
        (A100, torch.float32, {}, EFFICIENT),
        (V100, torch.float16, {}, EFFICIENT),
        (V100, torch.bfloat16, {}, "aten._safe_softmax.default"),
        (A100, torch.float32, {"grouped": True}, "aten._safe_softmax.default"),
        (A100, torch.float32, {"width": 12}, "aten._safe_softmax.default"),
        (A100, torch.bfloat16, {"width": 12}, FLASH),
        (A100, torch.bfloat16, {"width": 2048}, EFFICIENT),
    ],
)
def test_attention_is_chosen_as_torch_chooses_it_on_a_card(at, dtype, options, expected):
    found = names(operators(Attention(**options).to(dtype), batch(dtype, options.get("width", 64)), at))
    assert found[expected] == 1
    assert ON_CPU not in found
    assert sum(found[name] for name in (FLASH, EFFICIENT)) == (expected in (FLASH, EFFICIENT))


def test_settings_of_attention_are_obeyed():
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert names(operators(Attention().bfloat16(), batch()))[EFFICIENT] == 1


def test_the_cpus_operators_come_back_and_real_tensors_keep_them():
    model, x = Attention(dropout=0.0), batch(torch.float32)
    plain = model(x)
    before = names(operators(model, x, None))
    with recorded_as(A100):
        assert torch.equal(model(x), plain)
        dropped = functional.dropout(torch.ones(8, requires_grad=True), 0.5)
        assert dropped.grad_fn.name() == "MulBackward0"
    assert names(operators(model, x, None)) == before
    assert before[ON_CPU] == 1


def test_dropout_keeps_a_mask_of_one_byte_each():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)), torch.randn(32, 64)
    on_card, on_cpu = operators(model, x), operators(model, x, None)
    assert names(on_card)["aten.native_dropout.default"] == 1
    assert names(on_cpu)["aten.native_dropout.default"] == 0

    def saved(record):
        return sum(storage.nbytes for storage in record.storages if storage.saved_by and storage.kind == "activation")

    # The CPU saves its mask as floats.
    assert saved(on_cpu) - saved(on_card) == 3 * 32 * 64


def test_batch_normalisation_is_cudnns():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(2))
    found = names(operators(model, torch.randn(2, 3, 8, 8)))
    assert found["aten.cudnn_batch_norm.default"] == 1
    assert found["aten.cudnn_batch_norm_backward.default"] == 1


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_autocast_casts_as_on_a_card(kind):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Softmax(-1))
    x = torch.randn(32, 64)

    def autocast():
        return torch.autocast(kind, dtype=torch.bfloat16)

    class Checked(nn.Module):
        """Fail where a layer's output is of another dtype; a list of those seen would be put back after the step."""

        def __init__(self, *expected):
            super().__init__()
            self.inner, self.expected = model, expected

        def forward(self, x):
            for layer, dtype in zip(self.inner, self.expected, strict=False):
                x = layer(x)
                assert x.dtype is dtype, f"{type(layer).__name__} gives {x.dtype}"
            return x

    operators(Checked(torch.bfloat16, torch.float32, torch.float32), x, context=autocast)
    with pytest.raises(DryRunError, match=r"LayerNorm gives torch\.float32"):
        operators(Checked(torch.bfloat16, torch.bfloat16), x, context=autocast)
    if kind == "cpu":
        operators(Checked(torch.bfloat16, torch.bfloat16), x, None, context=autocast)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    ids = torch.randint(0, 128, (2, 32))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=4, n_positions=32, vocab_size=128, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(0, 128, (2, 32))
    return GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def vit():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Conv2d(3, 64, 8, 8), nn.Flatten(2), Transposed(), layer, layer), torch.randn(2, 3, 32, 32)


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2).contiguous()


def unet():
    blocks = [nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, 2, 1)]
    return nn.Sequential(*blocks, nn.BatchNorm2d(16), nn.Upsample(scale_factor=2.0)), torch.randn(2, 4, 16, 16)


EXPECTED = {
    "llama": (llama, {}),
    "gpt2": (gpt2, {"aten.native_dropout.default"}),
    "vit": (vit, {"aten.native_dropout.default", FLASH}),
    "unet": (unet, {"aten.cudnn_batch_norm.default"}),
}


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
@pytest.mark.parametrize("name", EXPECTED)
def test_models_are_recorded_with_the_cards_operators(name, precision):
    make, expected = EXPECTED[name]
    torch.manual_seed(0)
    model, data = make()
    context = nullcontext
    if precision == "bfloat16":
        model = model.bfloat16()
        data = data.bfloat16() if isinstance(data, torch.Tensor) else data
    else:

        def context():
            return torch.autocast("cuda", dtype=torch.bfloat16)

    found = names(operators(model.train(), data, context=context))
    assert set(expected) <= set(found)
    assert ON_CPU not in found
    assert not any("bernoulli" in operator or operator == "aten.native_batch_norm.default" for operator in found)
    if name in ("llama", "gpt2"):
        assert found[FLASH] + found[EFFICIENT] == 2
