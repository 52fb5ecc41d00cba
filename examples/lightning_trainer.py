"""Train with Lightning: plan the network inside the LightningModule, then fit as usual."""

import lightning
import torch
from remat.planner import Plan, apply, plan
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """A deep network; `network` is what is planned."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(6)]
        self.network = nn.Sequential(*blocks, nn.Linear(64, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return (self.network(inputs) - targets).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def train(inputs: torch.Tensor, targets: torch.Tensor, p: Plan | None) -> float:
    lightning.seed_everything(0, verbose=False)
    module = Regression()
    if p is not None:
        apply(module.network, p)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(inputs, targets), batch_size=1024))
    return sum(parameter.double().sum().item() for parameter in module.parameters())


def main() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(2048, 64), torch.randn(2048, 1)
    p = plan(
        Regression().network.train(), inputs[:1024], budget="60%", solver="dp", optimizer="adamw", holds_output=False
    )
    print(p)
    plain, planned = train(inputs, targets, None), train(inputs, targets, p)
    print(f"sum of the trained parameters: {plain:.12f} without a plan, {planned:.12f} with it")
    assert plain == planned


if __name__ == "__main__":
    main()
