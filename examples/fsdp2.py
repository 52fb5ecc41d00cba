"""Shard a planned model over processes: torchrun --standalone --nproc-per-node 2 examples/fsdp2.py.

The plan is made before anything is sharded. `units` and `ranks` say how it will be, so the budget is that of one rank.
"""

import torch
from remat import Plan, apply, plan
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    )


def shared_plan(batch: torch.Tensor) -> Plan:
    """Plan on rank 0 and send the plan to all ranks as text."""
    text = [""]
    if distributed.get_rank() == 0:
        model = build()
        p = plan(model, batch, budget="60%", solver="dp", units=model, ranks=distributed.get_world_size())
        print(p)
        text = [p.to_json()]
    distributed.broadcast_object_list(text, src=0)
    return Plan.from_json(text[0])


def gradients(batch: torch.Tensor, p: Plan | None) -> list[torch.Tensor]:
    model, mesh = build(), init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if p is not None:
        apply(model, p)
    model(batch).square().mean().backward()
    return [parameter.grad.to_local() for parameter in model.parameters()]


def main() -> None:
    distributed.init_process_group("gloo")
    p = shared_plan(torch.randn(1024, 64))
    torch.manual_seed(distributed.get_rank())
    batch = torch.randn(1024, 64)
    equal = all(torch.equal(a, b) for a, b in zip(gradients(batch, None), gradients(batch, p), strict=True))
    print(f"rank {distributed.get_rank()}: sharded gradients bitwise equal with and without the plan: {equal}")
    assert equal
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
