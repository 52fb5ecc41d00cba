"""The models that the tables speak of. Random weights; nothing is downloaded.

M1s      GPT-2, 12 x 384, sequence 256, batch 8, vocabulary 8192, fused attention
M1e      the same with eager attention
M2       Llama, 8 x 512, sequence 256, batch 4
M3       ResNet-50, batch 8 at 224
M4       32 x (Linear + GELU), widths from 64 to 2048, batch 1024
M5       U-Net, 3 levels, batch 8 at 128
ViT      ViT-S/16, batch 8 at 224
T5       6 + 6 layers of 512, sequences of 128, batch 8
Whisper  4 + 4 layers of 384, 30 s of sound, batch 2
"""

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

NAMES = ("M1s", "M1e", "M2", "M3", "M4", "M5", "ViT", "T5", "Whisper")
# fmt: off
WIDTHS = [256, 2048, 64, 512, 1024, 128, 2048, 256, 64, 1536, 64, 768, 2048, 512, 96, 1024, 1024,
          64, 384, 2048, 128, 128, 1280, 64, 2048, 640, 256, 1792, 64, 512, 2048, 320, 256]
# fmt: on

HOLDS_OUTPUT = frozenset({"M4", "M5"})
"""Models whose loops keep the output, `out = model(x)`; the others' take `model(**batch).loss` and drop it."""
Built = tuple[nn.Module, object, Callable | None]


class UNet(nn.Module):
    """Join encoder and decoder by skip connections: what a container computes itself between its calls."""

    def __init__(self, channels: int = 32, depth: int = 3):
        super().__init__()
        self.down, self.up, self.grow = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        width = 3
        for level in range(depth):
            self.down.append(_pair(width, channels * 2**level))
            width = channels * 2**level
        self.mid = _pair(width, 2 * width)
        width *= 2
        for level in reversed(range(depth)):
            narrower = channels * 2**level
            self.grow.append(nn.ConvTranspose2d(width, narrower, 2, stride=2))
            self.up.append(_pair(2 * narrower, narrower))
            width = narrower
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, image):
        """Return four channels for every pixel."""
        skips = []
        for down in self.down:
            image = down(image)
            skips.append(image)
            image = F.max_pool2d(image, 2)
        image = self.mid(image)
        for grow, up in zip(self.grow, self.up, strict=True):
            image = up(torch.cat([grow(image), skips.pop()], 1))
        return self.head(image)


def _pair(inside: int, outside: int) -> nn.Sequential:
    first = (nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.ReLU())
    return nn.Sequential(*first, nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.ReLU())


def build(name: str, *, dropout: float = 0.1, scale: float = 1.0) -> Built:
    """Return (model, batch, loss); loss is None where the model's output carries it.

    Args:
        name: One of `NAMES`.
        dropout: Where the model has any.
        scale: What to multiply the batch's size by.
    """
    torch.manual_seed(0)
    return _BUILDERS[name](dropout, lambda size: max(1, int(size * scale)))


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """Return a loss for models that have none."""
    return output.square().mean()


def _of_config(model: str, config: str, batch: Callable[[], dict], **options: object) -> Built:
    import transformers

    transformers.logging.set_verbosity_error()
    return getattr(transformers, model)(getattr(transformers, config)(**options)).train(), batch(), None


def _tokens(size: int, length: int = 256, vocabulary: int = 8192) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (size, length))
    return {"input_ids": ids, "labels": ids}


def _gpt2(dropout: float, sized: Callable[[int], int], attention: str) -> Built:
    return _of_config(
        "GPT2LMHeadModel",
        "GPT2Config",
        lambda: _tokens(sized(8)),
        n_layer=12,
        n_embd=384,
        n_head=6,
        n_positions=256,
        vocab_size=8192,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    )


def _llama(_: float, sized: Callable[[int], int]) -> Built:
    return _of_config(
        "LlamaForCausalLM",
        "LlamaConfig",
        lambda: _tokens(sized(4)),
        num_hidden_layers=8,
        hidden_size=512,
        intermediate_size=1376,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8192,
        max_position_embeddings=256,
        use_cache=False,
    )


def _images(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(size, 3, 224, 224), "labels": torch.randint(0, 2, (size,))}


def _resnet(_: float, sized: Callable[[int], int]) -> Built:
    return _of_config("ResNetForImageClassification", "ResNetConfig", lambda: _images(sized(8)))


def _chain(_: float, sized: Callable[[int], int]) -> Built:
    layers = [nn.Sequential(nn.Linear(first, second), nn.GELU()) for first, second in itertools.pairwise(WIDTHS)]
    return nn.Sequential(*layers).train(), (torch.randn(sized(1024), WIDTHS[0]),), mean_square


def _unet(_: float, sized: Callable[[int], int]) -> Built:
    return UNet().train(), (torch.randn(sized(8), 3, 128, 128),), mean_square


def _vit(dropout: float, sized: Callable[[int], int]) -> Built:
    return _of_config(
        "ViTForImageClassification",
        "ViTConfig",
        lambda: _images(sized(8)),
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=1536,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout),
    )


def _t5(dropout: float, sized: Callable[[int], int]) -> Built:
    return _of_config(
        "T5ForConditionalGeneration",
        "T5Config",
        lambda: _tokens(sized(8), 128),
        num_layers=6,
        d_model=512,
        d_ff=2048,
        num_heads=8,
        d_kv=64,
        vocab_size=8192,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )


def _whisper(dropout: float, sized: Callable[[int], int]) -> Built:
    def batch() -> dict[str, torch.Tensor]:
        size = sized(2)
        return {"input_features": torch.randn(size, 80, 3000), "labels": torch.randint(3, 8192, (size, 64))}

    return _of_config(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        batch,
        encoder_layers=4,
        decoder_layers=4,
        d_model=384,
        vocab_size=8192,
        num_mel_bins=80,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        use_cache=False,
        dropout=dropout,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


_BUILDERS: dict[str, Callable[[float, Callable[[int], int]], Built]] = {
    "M1s": lambda dropout, sized: _gpt2(dropout, sized, "sdpa"),
    "M1e": lambda dropout, sized: _gpt2(dropout, sized, "eager"),
    "M2": _llama,
    "M3": _resnet,
    "M4": _chain,
    "M5": _unet,
    "ViT": _vit,
    "T5": _t5,
    "Whisper": _whisper,
}
