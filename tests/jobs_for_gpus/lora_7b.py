"""A Llama of 7 billion parameters in bf16, fine-tuned by LoRA: built on meta tensors, too large for this machine."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import fxcomp

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, LENGTH, RANK = 32000, 4096, 11008, 32, 32, 512, 16
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class LoRA(nn.Module):
    """A frozen layer and a product of two thin matrices beside it."""

    def __init__(self, base, rank=RANK, alpha=32):
        super().__init__()
        self.base, self.scaling = base.requires_grad_(False), alpha / rank
        at = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, **at))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, **at))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        of = x.float()
        return (of * torch.rsqrt(of.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotated(x, cos, sin):
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-other, one), dim=-1) * sin


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        h = self.input_layernorm(x)
        q, k, v = (p(h).view(b, t, HEADS, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + self.o_proj(out.transpose(1, 2).reshape(b, t, WIDTH))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), RMSNorm()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        half = WIDTH // HEADS // 2
        rates = 10000.0 ** (-torch.arange(half, device=x.device).float() / half)
        angles = torch.outer(torch.arange(input_ids.shape[1], device=x.device).float(), rates)
        cos, sin = (f(torch.cat((angles, angles), dim=-1)).to(x.dtype) for f in (torch.cos, torch.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def get_peft_model(model):
    model.requires_grad_(False)
    for layer in model.layers:
        layer.q_proj, layer.v_proj = LoRA(layer.q_proj), LoRA(layer.v_proj)
    return model


torch.set_float32_matmul_precision("high")
with torch.device("meta"):
    model = Llama().to(torch.bfloat16)
model = get_peft_model(model)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=2e-4, weight_decay=0.0, fused=device.type == "cuda")
total, free = torch.cuda.mem_get_info()[::-1]
print(f"{sum(p.numel() for p in trainable):,} parameters on {torch.cuda.get_device_name()}, {free:,} of {total:,} B")
model = model.to(device)


def compute_loss(model, batch):
    input_ids = batch["input_ids"].to(next(model.parameters()).device, non_blocking=True)
    labels = batch["labels"].cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(input_ids)
    return F.cross_entropy(logits[:, :-1].float().reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


def batch():
    tokens = torch.randint(VOCABULARY, (1, LENGTH))
    return {"input_ids": tokens.pin_memory(), "labels": tokens.clone()}


def train(steps=10):
    for _ in range(steps):
        loss = compute_loss(model, batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def job():
    return fxcomp.Job(model, compute_loss, optimizer, batch(), max_grad_norm=1.0)
