"""A classifier of texts, trained by a loop such as the Trainer of transformers runs."""

import contextlib
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxcomp


@dataclass
class TrainingArguments:
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 2
    max_grad_norm: float = 1.0
    learning_rate: float = 5e-5
    fp16: bool = True
    bf16: bool = False
    gradient_checkpointing: bool = True
    local_rank: int = field(default_factory=lambda: int(os.environ.get("LOCAL_RANK", "-1")))

    @property
    def device(self):
        if self.local_rank != -1 and not dist.is_initialized():
            dist.init_process_group(backend="nccl")
        device = torch.device("cuda", max(self.local_rank, 0)) if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    @property
    def n_gpu(self):
        return 1 if self.local_rank != -1 else torch.cuda.device_count()


class Classifier(nn.Module):
    def __init__(self, vocabulary=512, width=64, labels=5):
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, labels)
        self.gradient_checkpointing = False

    @property
    def device(self):
        return next(self.parameters()).device

    def forward(self, input_ids, attention_mask, labels):
        assert input_ids.device == self.device, f"inputs are on {input_ids.device}, the model on {self.device}"
        hidden = self.embeddings(input_ids)
        padding = attention_mask == 0
        for layer in self.encoder.layers:
            if self.gradient_checkpointing and self.training:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, None, padding, use_reentrant=False)
            else:
                hidden = layer(hidden, src_key_padding_mask=padding)
        logits = self.classifier(hidden[:, 0])
        return {"loss": nn.functional.cross_entropy(logits.float(), labels.to(logits.device)), "logits": logits}


class Trainer:
    def __init__(self, model, args, dataset):
        self.args, self.model = args, model.to(args.device)
        self.model.gradient_checkpointing = args.gradient_checkpointing
        workers = {"pin_memory": torch.cuda.is_available(), "num_workers": 0}
        self.loader = DataLoader(dataset, args.per_device_train_batch_size * args.n_gpu, **workers)
        no_decay = [n for n, _ in model.named_parameters() if "bias" in n or "norm" in n]
        groups = [
            {"params": [p for n, p in model.named_parameters() if n not in no_decay], "weight_decay": 0.01},
            {"params": [p for n, p in model.named_parameters() if n in no_decay], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, fused=args.device.type == "cuda")
        self.scaler = torch.amp.GradScaler("cuda") if args.fp16 else None
        self.wrapped = self.model
        if args.local_rank != -1:
            self.wrapped = nn.parallel.DistributedDataParallel(
                self.model, device_ids=[args.local_rank], output_device=args.local_rank, find_unused_parameters=False
            )
        elif args.n_gpu > 1:
            self.wrapped = nn.DataParallel(self.model)

    def prepare_inputs(self, batch):
        names = ("input_ids", "attention_mask", "labels")
        return {name: tensor.to(self.args.device) for name, tensor in zip(names, batch, strict=True)}

    def autocast(self):
        if self.args.fp16 or self.args.bf16:
            dtype = torch.float16 if self.args.fp16 else torch.bfloat16
            return torch.autocast(device_type=self.args.device.type, dtype=dtype, cache_enabled=True)
        return contextlib.nullcontext()

    def compute_loss(self, model, inputs):
        with self.autocast():
            loss = model(**inputs)["loss"]
        return loss.mean() if self.args.n_gpu > 1 else loss

    def train(self):
        self.wrapped.train()
        for step, batch in enumerate(self.loader):
            is_last = (step + 1) % self.args.gradient_accumulation_steps == 0
            sync = contextlib.nullcontext() if is_last or self.args.local_rank == -1 else self.wrapped.no_sync()
            with sync:
                loss = self.compute_loss(self.wrapped, self.prepare_inputs(batch))
                self.scaler.scale(loss / self.args.gradient_accumulation_steps).backward()
            if is_last:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.wrapped.parameters(), self.args.max_grad_norm)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.wrapped.zero_grad()
        torch.cuda.empty_cache()


def build():
    torch.manual_seed(42)
    torch.cuda.manual_seed_all(42)
    rows = 64
    texts = TensorDataset(
        torch.randint(512, (rows, 32)), torch.ones(rows, 32, dtype=torch.long), torch.randint(5, (rows,))
    )
    return Trainer(Classifier(), TrainingArguments(), texts)


def job():
    trainer = build()
    trainer.wrapped.train()
    batch = trainer.prepare_inputs(next(iter(trainer.loader)))
    limit = trainer.args.max_grad_norm
    return fxcomp.Job(
        trainer.wrapped, trainer.compute_loss, trainer.optimizer, batch, max_grad_norm=limit, scaler=trainer.scaler
    )


if __name__ == "__main__":
    build().train()
