"""Train a tiny GPT-2 with the transformers Trainer, with and without a plan, to the same loss."""

import tempfile

import torch
from remat.integrations.transformers import PlanCallback
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


def train(*callbacks: TrainerCallback) -> float:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_embd=64, n_head=4, n_positions=128, vocab_size=256, bos_token_id=0, eos_token_id=0)
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(256, (16, 128))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=4,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[*callbacks])
        return trainer.train().training_loss


def main() -> None:
    # All that a plan takes: a callback. "auto" takes what the device has free.
    callback = PlanCallback("60%", solver="dp")
    losses = train(), train(callback)
    print(callback.plan)
    print(f"mean loss of 4 steps: {losses[0]:.6f} without a plan, {losses[1]:.6f} with it")
    assert losses[0] == losses[1]


if __name__ == "__main__":
    main()
