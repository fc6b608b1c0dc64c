"""A training loop on a GPU as one writes it by hand in PyTorch, without crosstrain: what gpu_step.py compares the measured step with.

Usage: <a Python with PyTorch> gpu_loop_torch.py NETWORK PRECISION BATCH COMPILE MEMORY_FORMAT SECONDS. Prints a JSON object: the median
over blocks of at least 0.5 s (`step_ms`), in milliseconds per iteration.
"""

import contextlib
import itertools
import json
import statistics
import sys
import time

import torch
from torch import nn

BLOCK_S = 0.5
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resnet50(stride_in_3x3):
    """ResNet-50 as in torchvision's model, or with the stride in the first 1x1 convolution of a stage (He et al. 2016, v1)."""

    class Bottleneck(nn.Module):
        def __init__(self, inputs, width, stride):
            super().__init__()
            first, second = (1, stride) if stride_in_3x3 else (stride, 1)
            self.conv1 = nn.Conv2d(inputs, width, 1, first, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, second, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(width)
            self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
            self.bn3 = nn.BatchNorm2d(4 * width)
            self.relu = nn.ReLU(inplace=True)
            self.shortcut = None
            if stride > 1 or inputs != 4 * width:
                self.shortcut = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

        def forward(self, x):
            y = self.relu(self.bn1(self.conv1(x)))
            y = self.relu(self.bn2(self.conv2(y)))
            y = self.bn3(self.conv3(y))
            return self.relu(y + (x if self.shortcut is None else self.shortcut(x)))

    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            layers.append(Bottleneck(inputs, 64 * 2**stage, 2 if stage and not block else 1))
            inputs = 256 * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def fcn_s():
    layers = [nn.Linear(26752, 2048), nn.Sigmoid()]
    for _ in range(3):
        layers += [nn.Linear(2048, 2048), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(2048, 26752))
    for layer in model[::2]:
        # what crosstrain starts from: sigmoids that saturate draw more power than those that stay at 0.5, and power limits the clock
        nn.init.xavier_uniform_(layer.weight, gain=4)
        nn.init.zeros_(layer.bias)
    return model


#: network: (model, shape of an input, classes, momentum)
NETWORKS = {
    "resnet50": (lambda: resnet50(False), (3, 224, 224), 1000, 0.9),
    "resnet50_v1.5": (lambda: resnet50(True), (3, 224, 224), 1000, 0.9),
    "fcn_s": (fcn_s, (26752,), 26752, 0.0),
}


class Loop:
    """Model, batches on the GPU, and one iteration."""

    def __init__(self, network, precision, batch, compiled, memory_format):
        make, shape, classes, momentum = NETWORKS[network]
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(1)
        self.model = make().cuda()
        images = len(shape) == 3 and memory_format == "channels_last"
        if images:
            self.model.to(memory_format=torch.channels_last)
        criterion = nn.CrossEntropyLoss()
        self.forward = lambda inputs, targets: criterion(self.model(inputs), targets)
        if compiled != "off":
            self.forward = torch.compile(self.forward, dynamic=False, mode="max-autotune" if compiled == "max" else None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=momentum, fused=True)
        self.cast = torch.autocast("cuda", HALF[precision]) if precision in HALF else contextlib.nullcontext()
        self.scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
        ring = []
        for _ in range(2):
            inputs = torch.randn(batch, *shape, device="cuda")
            inputs = inputs.contiguous(memory_format=torch.channels_last) if images else inputs
            ring.append((inputs, torch.randint(0, classes, (batch,), device="cuda")))
        self.ring = itertools.cycle(ring)

    def iteration(self):
        inputs, targets = next(self.ring)
        self.optimizer.zero_grad(set_to_none=True)
        with self.cast:
            loss = self.forward(inputs, targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def block(self, iterations):
        """Seconds of so many iterations."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(iterations):
            self.iteration()
        torch.cuda.synchronize()
        return time.perf_counter() - start


def measure(loop, seconds):
    """{"step_ms", "first_s" (the first iteration, with compiling)}."""
    first = loop.block(1)
    loop.block(20)
    size = max(1, int(BLOCK_S / loop.block(5) * 5) + 1)
    end = time.perf_counter() + seconds
    blocks = []
    while len(blocks) < 3 or time.perf_counter() < end:
        blocks.append(1000 * loop.block(size) / size)
    return {"step_ms": statistics.median(blocks), "first_s": first}


if __name__ == "__main__":
    network, precision, batch, compiled, memory_format, seconds = sys.argv[1:]
    print(json.dumps(measure(Loop(network, precision, int(batch), compiled, memory_format), float(seconds))))
