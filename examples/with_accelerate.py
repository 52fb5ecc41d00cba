"""Accumulate gradients with accelerate, with and without a plan: one call before each step makes the difference."""

import torch
from accelerate import Accelerator
from remat.integrations.accelerate import plan_once
from torch import nn

MICRO_BATCHES = 4


def train(budget: str | None) -> list[float]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(64, 1))
    batches = [(torch.randn(1024, 64), torch.randn(1024, 1)) for _ in range(2 * MICRO_BATCHES)]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for inputs, targets in batches:

        def loss_of(output: torch.Tensor, targets: torch.Tensor = targets) -> torch.Tensor:
            return (output - targets).square().mean()

        if budget is not None:
            # Acts at the first batch only; precision and accumulation are the accelerator's.
            plan_once(accelerator, model, inputs, budget, loss=loss_of, optimizer=optimizer, solver="dp")
        with accelerator.accumulate(model):
            loss = loss_of(model(inputs))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    plain, planned = train(None), train("60%")
    for number, losses in enumerate(zip(plain, planned, strict=True)):
        print(f"micro-batch {number}: loss {losses[0]:.6f} without a plan, {losses[1]:.6f} with it")
    assert plain == planned


if __name__ == "__main__":
    main()
