"""Small models of many kinds: what people train, and what broke other tools. Each returns (model, batch, loss)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

SEQUENCE, VOCABULARY, WIDTH = 32, 128, 32


def ids(*shape):
    return torch.randint(3, VOCABULARY, shape)


def tokens(batch=4, length=SEQUENCE):
    sample = ids(batch, length)
    return {"input_ids": sample, "labels": sample}


def from_config(name, config, batch):
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config.pop("config"))(**config))
    return model.train(), batch, None


def gpt2(**more):
    config = {"n_layer": 3, "n_embd": WIDTH, "n_head": 2, "n_positions": SEQUENCE, "vocab_size": VOCABULARY}
    config |= {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False, **more}
    return from_config("GPT2LMHeadModel", {"config": "GPT2Config", **config}, tokens())


def gpt2_eager():
    return gpt2(attn_implementation="eager")


def gpt2_adapters():
    model, batch, loss = gpt2()
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.mlp.c_fc = LowRank(block.mlp.c_fc, WIDTH, 4 * WIDTH)
    return model.train(), batch, loss


class LowRank(nn.Module):
    def __init__(self, base, inner, outer):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(inner, 4, bias=False), nn.Linear(4, outer, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def decoder(name, config, **more):
    common = {"num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 2}
    common |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE}
    return from_config(name, {"config": config, **common, "use_cache": False, **more}, tokens())


def llama():
    return decoder("LlamaForCausalLM", "LlamaConfig")


def qwen2():
    return decoder("Qwen2ForCausalLM", "Qwen2Config")


def mixtral():
    return decoder("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, output_router_logits=True)


def mamba():
    config = {"num_hidden_layers": 2, "hidden_size": WIDTH, "state_size": 4, "vocab_size": VOCABULARY}
    return from_config("MambaForCausalLM", {"config": "MambaConfig", **config, "use_cache": False}, tokens(length=8))


def bert():
    config = {"num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 2}
    config |= {"vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE}
    return from_config("BertForMaskedLM", {"config": "BertConfig", **config}, tokens())


def t5():
    config = {"num_layers": 2, "d_model": WIDTH, "d_ff": 64, "num_heads": 2, "d_kv": 16, "vocab_size": VOCABULARY}
    config["decoder_start_token_id"] = config["pad_token_id"] = 0
    return from_config("T5ForConditionalGeneration", {"config": "T5Config", **config, "use_cache": False}, tokens())


def vit():
    config = {"num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 2}
    config |= {"image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.1}
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 0, 1])}
    return from_config("ViTForImageClassification", {"config": "ViTConfig", **config}, batch)


def swin():
    config = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2]}
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return from_config(
        "SwinForImageClassification", {"config": "SwinConfig", **config, "window_size": 4, "drop_path_rate": 0.2}, batch
    )


def resnet():
    config = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 0, 1])}
    return from_config("ResNetForImageClassification", {"config": "ResNetConfig", **config}, batch)


def convnext():
    config = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.2}
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return from_config("ConvNextForImageClassification", {"config": "ConvNextConfig", **config}, batch)


def clip():
    text = {"num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 2}
    vision = {**text, "image_size": 32, "patch_size": 8}
    text |= {"vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE, "eos_token_id": 2}
    config = {"text_config": text, "vision_config": vision, "projection_dim": 16}
    batch = {"input_ids": ids(4, SEQUENCE), "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}
    return from_config("CLIPModel", {"config": "CLIPConfig", **config}, batch)


def whisper():
    config = {"encoder_layers": 2, "decoder_layers": 2, "d_model": WIDTH, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": VOCABULARY, "num_mel_bins": 8}
    config |= {"max_source_positions": 32, "max_target_positions": SEQUENCE, "pad_token_id": 0, "use_cache": False}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    batch = {"input_features": torch.randn(2, 8, 64), "labels": ids(2, 16)}
    return from_config("WhisperForConditionalGeneration", {"config": "WhisperConfig", **config}, batch)


def wav2vec2():
    config = {"num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 2}
    config |= {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2}
    config |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": VOCABULARY}
    batch = {"input_values": torch.randn(2, 800), "labels": ids(2, 6)}
    return from_config("Wav2Vec2ForCTC", {"config": "Wav2Vec2Config", **config, "mask_time_length": 2}, batch)


def mean_square(out):
    return out.square().mean()


def chain(widths=(32, 256, 16, 128, 64, 16, 256, 32)):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)]
    return nn.Sequential(*blocks).train(), (torch.randn(128, widths[0]),), mean_square


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.down = nn.ModuleList([conv_pair(3, c), conv_pair(c, 2 * c)])
        self.mid = conv_pair(2 * c, 4 * c)
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(4 * c, 2 * c, 2, stride=2), nn.ConvTranspose2d(2 * c, c, 2, stride=2)]
        )
        self.up = nn.ModuleList([conv_pair(4 * c, 2 * c), conv_pair(2 * c, c)])
        self.head = nn.Conv2d(c, 4, 1)

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.mid(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([grow(x), skips.pop()], 1))
        return self.head(x)


def conv_pair(a, b):
    return nn.Sequential(
        *(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU()),
        *(nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU()),
    )


def unet():
    torch.manual_seed(0)
    return UNet().train(), torch.randn(2, 3, 32, 32), mean_square


class Dense(nn.Module):
    def __init__(self, width=16, layers=5):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(width * (i + 1), width), nn.Tanh()) for i in range(layers)]
        )

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, -1)))
        return torch.cat(features, -1)


def dense():
    torch.manual_seed(0)
    return Dense().train(), torch.randn(256, 16), mean_square


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2)
        self.head = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, VOCABULARY))

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0])


def lstm():
    torch.manual_seed(0)
    return Recurrent().train(), ids(4, SEQUENCE), mean_square


class Residual(nn.Module):
    def __init__(self, c, momentum):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c, momentum=momentum)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


def batch_norm():
    torch.manual_seed(0)
    blocks = [Residual(8, None if i == 1 else 0.1) for i in range(4)]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    return model.train(), torch.randn(4, 3, 16, 16), mean_square


@dataclass
class Result:
    scores: torch.Tensor
    hidden: torch.Tensor


class TwoTowers(nn.Module):
    """Two inputs, one tower used for both, several outputs of the kind asked for."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.tower = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, left, right, *, scale=None):
        a, b = self.tower(left), self.tower(right)
        scores = self.head(torch.cat([a, b], -1)) * (1.0 if scale is None else scale)
        if self.kind == "dict":
            return {"scores": scores, "extra": {"hidden": [a, b]}, "name": "towers"}
        return Result(scores, a) if self.kind == "dataclass" else (scores, (a, b))


def towers_tuple():
    torch.manual_seed(0)
    return TwoTowers("tuple").train(), (torch.randn(64, 16), torch.randn(64, 16)), lambda out: mean_square(out[0])


def towers_dict():
    torch.manual_seed(0)
    batch = {"left": torch.randn(64, 16), "right": torch.randn(64, 16), "scale": torch.tensor(0.5)}
    return TwoTowers("dict").train(), batch, lambda out: mean_square(out["scores"]) + out["extra"]["hidden"][0].mean()


def towers_dataclass():
    torch.manual_seed(0)
    batch = (torch.randn(64, 16), torch.randn(64, 16))
    return TwoTowers("dataclass").train(), batch, lambda out: mean_square(out.scores) + out.hidden.mean()


class Looped(nn.Module):
    """One block applied again and again, as in a universal transformer."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))

    def forward(self, x):
        for _ in range(4):
            x = x + self.block(x)
        return x


def looped():
    torch.manual_seed(0)
    return Looped().train(), torch.randn(128, 32), mean_square


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2), nn.Linear(64, 32), nn.Tanh())
        self.judge = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1))

    def forward(self, noise, real):
        fake = self.make(noise)
        return {"loss": F.softplus(self.judge(fake)).mean() + F.softplus(-self.judge(real)).mean()}


def gan():
    torch.manual_seed(0)
    return Gan().train(), (torch.randn(64, 8), torch.randn(64, 32)), None


def rrelu():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.RReLU(0.1, 0.9)) for _ in range(4)]
    return nn.Sequential(*blocks).train(), torch.randn(64, 64), lambda out: out.sum()


def torch_encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3).train(), torch.randn(4, 16, 32), mean_square


ZOO = {
    factory.__name__: factory
    for factory in (
        *(gpt2, gpt2_eager, gpt2_adapters, llama, qwen2, mixtral, mamba, bert, t5, vit, swin, resnet, convnext, clip),
        *(whisper, wav2vec2, chain, unet, dense, lstm, batch_norm, towers_tuple, towers_dict, towers_dataclass),
        *(looped, gan, rrelu, torch_encoder),
    )
}
