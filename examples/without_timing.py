"""Plan where nothing can be timed: times are then estimates, and the plan says so."""

import torch
from remat import InfeasibleBudgetError, Planner
from torch import nn


def main() -> None:
    blocks = [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(8)]
    model, batch = nn.Sequential(*blocks), torch.randn(4096, 128)

    # One profile serves any number of budgets. With no repeats the model is never really run.
    planner = Planner.of(model, batch, repeats=0)
    print(f"times: {planner.profile.times_from}")
    for budget in ("80%", "60%", "40%", "20%"):
        try:
            p = planner.plan(budget, solver="dp")
            added = f"{p.predicted_overhead:.1%} more time ({p.times_from})"
            print(f"{budget}: {p.predicted_peak_bytes:,} bytes, {added}, {len(p.segments)} segments")
        except InfeasibleBudgetError as error:
            print(f"{budget}: {error}")


if __name__ == "__main__":
    main()
