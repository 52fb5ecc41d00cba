"""Train with Lightning: a callback plans the module's `training_step` at the first batch."""

import tempfile

import lightning
import torch
from remat.integrations.lightning import PlanCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """A deep network under a squared error."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(6)]
        self.body, self.head = nn.Sequential(*blocks), nn.Linear(64, 1)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return (self.head(self.body(inputs)) - targets).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def train(*callbacks: lightning.Callback) -> float:
    lightning.seed_everything(0, verbose=False)
    module, rows = Regression(), TensorDataset(torch.randn(2048, 64), torch.randn(2048, 1))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*callbacks],
        )
        trainer.fit(module, DataLoader(rows, batch_size=1024))
    return sum(parameter.double().sum().item() for parameter in module.parameters())


def main() -> None:
    # All that a plan takes: a callback. "auto" takes what the device has free.
    callback = PlanCallback("60%", solver="dp")
    plain, planned = train(), train(callback)
    print(callback.plan)
    print(f"sum of the trained parameters: {plain:.12f} without a plan, {planned:.12f} with it")
    assert plain == planned


if __name__ == "__main__":
    main()
