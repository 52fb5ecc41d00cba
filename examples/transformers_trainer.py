"""Train a tiny GPT-2 with the transformers Trainer, with and without a plan, to the same loss."""

import tempfile

import torch
from remat.planner import apply, plan
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

# A model with use_cache on would hand a growing cache from block to block, which cannot be replayed.
CONFIG = GPT2Config(
    n_layer=4, n_embd=64, n_head=4, n_positions=128, vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False
)


def train(model: GPT2LMHeadModel, rows: list[dict[str, torch.Tensor]]) -> float:
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
        return Trainer(model=model, args=arguments, train_dataset=rows).train().training_loss


def main() -> None:
    torch.manual_seed(0)
    plain, planned = GPT2LMHeadModel(CONFIG), GPT2LMHeadModel(CONFIG)
    planned.load_state_dict(plain.state_dict())
    tokens = torch.randint(256, (16, 128))
    rows = [{"input_ids": row, "labels": row} for row in tokens]

    batch = {"input_ids": tokens[:4], "labels": tokens[:4]}
    p = plan(planned.train(), batch, budget="60%", solver="dp", optimizer="adamw", holds_output=False)
    print(p)
    apply(planned, p)

    losses = train(plain, rows), train(planned, rows)
    print(f"mean loss of 4 steps: {losses[0]:.6f} without a plan, {losses[1]:.6f} with it")
    assert losses[0] == losses[1]


if __name__ == "__main__":
    main()
