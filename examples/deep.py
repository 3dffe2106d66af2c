"""Two deep and narrow networks with more than 300 gradients each: what deciding costs shows here.

    fxcomp explain examples/deep.py:job --cluster 128x8       a ResNet-101 of an eighth of the width, 314 gradients
    fxcomp explain examples/deep.py:gpt --cluster 128x8       a GPT of 26 thin layers, 316 gradients

`python benchmarks/explain_speed.py` times the questions.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxcomp
from fxcomp.commands.demo.gpt import GPTConfig, gpt_job

CLASSES = 1000
PIXELS = 64
BLOCKS = (3, 4, 23, 3)  # ResNet-101's
Batch = tuple[Tensor, Tensor]


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, added to what comes in."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv_1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(width)
        self.conv_2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)
        self.conv_3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm_3 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        y = F.relu(self.norm_2(self.conv_2(y)))
        return F.relu(self.norm_3(self.conv_3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images in, logits of classes out."""

    def __init__(self, width: int = 8, blocks: tuple[int, ...] = BLOCKS) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages: list[nn.Module] = []
        inputs = width
        for number, count in enumerate(blocks):
            for k in range(count):
                stages.append(Bottleneck(inputs, width << number, 2 if k == 0 and number else 1))
                inputs = 4 * width << number
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(images), 3, 2, padding=1)
        return self.head(self.stages(x).mean((2, 3)))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def job(width: int = 8, images: int = 4) -> fxcomp.Job:
    torch.manual_seed(0)
    model = ResNet(width)
    batch = torch.randn(images, 3, PIXELS, PIXELS), torch.randint(CLASSES, (images,))
    return fxcomp.Job(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch)


def gpt() -> fxcomp.Job:
    return gpt_job(GPTConfig(layers=26, heads=4, width=128, context=64), batch_size=4)
