"""A loop of one's own: mixed precision, accumulated gradients, a moving average of the weights, and a plan."""

import torch
from remat.integrations import plan_once
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

MICRO_BATCHES = 2


def train(budget: str | None) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(64, 10))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # bfloat16 needs no scaling; float16 on a GPU does
    losses = []
    for number in range(4 * MICRO_BATCHES):
        inputs, labels = torch.randn(512, 64), torch.randint(10, (512,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if budget is not None:
                plan_once(
                    model,
                    inputs,
                    budget,
                    loss=lambda output, labels=labels: functional.cross_entropy(output, labels),
                    optimizer=optimizer,
                    accumulation=True,
                    solver="dp",
                )
            loss = functional.cross_entropy(model(inputs), labels) / MICRO_BATCHES
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if (number + 1) % MICRO_BATCHES == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            average.update_parameters(model)
    return losses, [parameter.detach() for parameter in average.parameters()]


def main() -> None:
    (plain, plain_average), (planned, average) = train(None), train("60%")
    for number, losses in enumerate(zip(plain, planned, strict=True)):
        print(f"micro-batch {number}: loss {losses[0]:.6f} without a plan, {losses[1]:.6f} with it")
    equal = all(torch.equal(a, b) for a, b in zip(plain_average, average, strict=True))
    print(f"averaged weights bitwise equal with and without the plan: {equal}")
    assert equal
    assert plain == planned


if __name__ == "__main__":
    main()
