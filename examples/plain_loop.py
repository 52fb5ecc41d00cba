"""Train a small network in a plain loop under a memory budget."""

import torch
from remat import apply, plan, verify
from torch import nn
from torch.nn import functional


def build() -> nn.Sequential:
    """Return a few convolutions over images; early layers keep most of the bytes, as in any pyramid."""
    layers, width = [], 3
    for wider in (16, 16, 32, 32, 64, 64):
        layers += [nn.Conv2d(width, wider, 3, padding=1), nn.GroupNorm(4, wider), nn.GELU()]
        layers += [nn.MaxPool2d(2)] if wider == 2 * width else []
        width = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def main() -> None:
    torch.manual_seed(0)
    model = build()
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))

    def loss(output: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, labels)

    p = plan(model, images, budget="60%", loss=loss, optimizer="adamw")
    print(p)
    print(verify(model, images, p, loss=loss))

    apply(model, p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        value = loss(model(images))
        value.backward()
        optimizer.step()
        print(f"step {step}: loss {value.item():.4f}")


if __name__ == "__main__":
    main()
