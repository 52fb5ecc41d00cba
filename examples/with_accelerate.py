"""Accumulate gradients with accelerate; the plan counts them as alive throughout."""

import torch
from accelerate import Accelerator
from remat.planner import apply, plan
from torch import nn

MICRO_BATCHES = 4


def main() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(64, 1))
    batches = [(torch.randn(1024, 64), torch.randn(1024, 1)) for _ in range(2 * MICRO_BATCHES)]

    # Plan and apply before prepare: what accelerate then puts around the model stays around the planned one.
    p = plan(model, batches[0][0], budget="60%", solver="dp", optimizer="adamw", accumulation=True)
    print(p)
    apply(model, p)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for number, (inputs, targets) in enumerate(batches):
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        print(f"micro-batch {number}: loss {loss.item():.4f}{', step' if accelerator.sync_gradients else ''}")


if __name__ == "__main__":
    main()
