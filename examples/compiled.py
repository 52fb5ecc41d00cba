"""Plan a model that is then compiled: segments must not run across a container's own operators."""

import torch
from remat import apply, plan
from torch import nn


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    torch.compiler.reset()
    # aot_eager traces forward and backward as the default backend does, and needs no C++ compiler.
    torch.compile(model, backend="aot_eager")(batch).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def main() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    model, batch = nn.Sequential(*blocks), torch.randn(1024, 64)

    p = plan(model, batch, budget="60%", solver="dp", cross_operators=False)
    print(p)
    unplanned = gradients(model, batch)
    with apply(model, p):
        planned = gradients(model, batch)
    equal = all(torch.equal(a, b) for a, b in zip(unplanned, planned, strict=True))
    print(f"{len(planned)} gradients of the compiled model, bitwise equal with and without the plan: {equal}")
    assert equal


if __name__ == "__main__":
    main()
