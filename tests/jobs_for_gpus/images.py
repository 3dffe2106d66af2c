"""A classifier of images, trained as the public scripts of timm do: channels_last, a GradScaler, timed on a stream."""

import torch
import torch.distributed as dist
from torch import nn

import fxcomp


def init_distributed_device():
    if not dist.is_initialized():
        dist.init_process_group(backend="nccl", init_method="env://")
    device = torch.device(f"cuda:{dist.get_rank() % torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    return device


torch.backends.cudnn.benchmark = True
torch.backends.cuda.matmul.allow_tf32 = True
device = init_distributed_device()
properties = torch.cuda.get_device_properties(device)
print(f"{properties.name}: {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}")


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(y)))


class Net(nn.Module):
    def __init__(self, width=32, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(2)])
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(width, classes))

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


class PrefetchLoader:
    """Copies the next batch on a stream of its own, and normalises it there."""

    def __init__(self, batches):
        self.batches = batches
        self.mean = torch.tensor([123.7, 116.3, 103.5], device=device).view(1, 3, 1, 1)
        self.std = torch.tensor([58.4, 57.1, 57.4], device=device).view(1, 3, 1, 1)

    def __iter__(self):
        stream = torch.cuda.Stream(device=device)
        for images, target in self.batches:
            with torch.cuda.stream(stream):
                images = images.to(device=device, non_blocking=True).float().sub_(self.mean).div_(self.std)
                target = target.to(device=device, non_blocking=True)
            torch.cuda.current_stream(device=device).wait_stream(stream)
            images.record_stream(torch.cuda.current_stream())
            yield images.contiguous(memory_format=torch.channels_last), target


class NativeScaler:
    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()

    def __call__(self, loss, optimizer, clip_grad, parameters):
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()


model = Net()
model.to(device=device, memory_format=torch.channels_last)
model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if dist.get_world_size() > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-5, fused=True)
model = nn.parallel.DistributedDataParallel(model, device_ids=[device], broadcast_buffers=True)
loss_scaler = NativeScaler()
criterion = nn.CrossEntropyLoss(label_smoothing=0.1).to(device=device)
images = [
    (torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8).pin_memory(), torch.randint(10, (8,))) for _ in range(4)
]
loader = PrefetchLoader(images)


def compute_loss(model, batch):
    images, target = batch
    with torch.autocast(device_type=device.type):
        return criterion(model(images), target)


def train():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    model.train()
    for batch in loader:
        start.record()
        loss = compute_loss(model, batch)
        optimizer.zero_grad()
        loss_scaler(loss, optimizer, 1.0, model.parameters())
        end.record()
        torch.cuda.synchronize()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        print(f"loss {mean.item() / dist.get_world_size():.3f} in {start.elapsed_time(end):.1f} ms")


def job():
    model.train()
    return fxcomp.Job(model, compute_loss, optimizer, next(iter(loader)), max_grad_norm=1.0, scaler=loss_scaler._scaler)


if __name__ == "__main__":
    train()
