"""Train a GPT-2 of random weights with transformers' Trainer and fxcomp's hook; it goes on from its last checkpoint.

torchrun --nproc-per-node 2 examples/recipes/trainer.py out
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from fxcomp.frontends.trainer import FxcompCallback


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count on from somewhere."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) + 7 * index) % 64
        return {"input_ids": tokens, "labels": tokens}


def main(folder: str, steps: int) -> None:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, save_steps=4, logging_steps=4, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=1e-3, lr_scheduler_type="constant", use_cpu=True, report_to=[],
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    trainer = Trainer(model, arguments, train_dataset=Counting())
    trainer.add_callback(FxcompCallback(trainer, compress="balanced"))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if Path(folder).is_dir() else None)
    trainer.accelerator.end_training()  # closes the process group: where it is left open, Python's end can abort


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100)
