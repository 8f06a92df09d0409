#!/usr/bin/env python3
"""Writes model_<name>.safetensors beside itself: how PyTorch trains seven small models, which
tests/models trains with this library.

    python3 tests/golden/models.py [NAME ..]      (torch 2.13, numpy and safetensors)

Weights and data are functions of names, by a hash, so that no file holds them: see uniform(),
initialise(), data(). A file has, as F64:

    f64.losses    the losses of 50 steps, computed in double; then that of evaluation
    f32.losses    the same in float
    f32.drift     for each step, the largest difference of losses in float, up to this step, of runs
                  whose initial weights are changed by 6e-8 of their values
    grad.PATH     of a parameter's gradient at the first step, in double: the sums of its elements
                  times the signs of four names, then its 2-norm
"""

import os
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = 50
CHANGED = 8  # runs with changed initial weights
torch.set_num_threads(1)

# ------------------------------------------------------------------ numbers of names


def hashes(name, count):
    """SplitMix64 of (FNV-1a of the name, 64 bits, plus i), for i from 0 to count - 1."""
    start = 0xCBF29CE484222325
    for byte in name.encode():
        start = (start ^ byte) * 0x100000001B3 % 2**64
    z = np.uint64(start) + np.arange(count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def uniform(name, shape):
    """Float64 numbers from -1 (included) to 1."""
    count = int(np.prod(shape, dtype=np.int64))
    numbers = (hashes(name, count) >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1
    return torch.from_numpy(numbers).reshape(shape)


def signs(name, shape):
    """1 where the hash is odd, else -1."""
    count = int(np.prod(shape, dtype=np.int64))
    odd = (hashes(name, count) & np.uint64(1)).astype(np.float64)
    return torch.from_numpy(2 * odd - 1).reshape(shape)


def data(name, step, *shape):
    """Input of a step: uniform numbers of the name "<name><step>", in the default dtype."""
    return uniform(f"{name}{step}", shape).to(torch.get_default_dtype())


def below(limit, name, step, *shape):
    """Integers of a step, from 0 to limit - 1: the hash modulo limit."""
    count = int(np.prod(shape, dtype=np.int64))
    numbers = hashes(f"{name}{step}", count) % np.uint64(limit)
    return torch.from_numpy(numbers.astype(np.int64)).reshape(shape)


def initial(path, shape):
    """Initial values of a parameter, in double: u / sqrt(fan_in) with two or more dimensions
    (fan_in: the product of all but the first), else 1 + 0.1 u where its name begins with "weight",
    else 0.1 u."""
    u = uniform(path, shape)
    if len(shape) >= 2:
        return u / np.sqrt(np.prod(shape[1:], dtype=np.int64))
    return 0.1 * u + (1 if path.rpartition(".")[2].startswith("weight") else 0)


# ------------------------------------------------------------------ training


def initialise(model, change=0):
    with torch.no_grad():
        for path, param in model.named_parameters():
            values = initial(path, tuple(param.shape))
            if change:
                values = values * (1 + 6e-8 * signs(f"{path}.change{change}", values.shape))
            param.copy_(values)


def train(make, loss_of, optimiser, dtype, change=0):
    """Returns the losses of all steps and one of evaluation mode, and the gradients of the first
    step by path."""
    torch.set_default_dtype(dtype)
    model = make()
    initialise(model, change)
    optim = optimiser(model.parameters())
    losses, gradients = [], {}
    for step in range(STEPS):
        optim.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if step == 0:
            gradients = {path: p.grad.double() for path, p in model.named_parameters()}
        optim.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(model, STEPS).item())
    return torch.tensor(losses, dtype=torch.float64), gradients


def write(name, make, loss_of, optimiser):
    """make() returns the model, loss_of(model, step) the loss of a step, optimiser(parameters) the
    optimiser."""
    losses, gradients = train(make, loss_of, optimiser, torch.float64)
    tensors = {"f64.losses": losses}
    for path, g in gradients.items():
        sums = [(g * signs(f"{path}.sign{k}", g.shape)).sum() for k in range(4)]
        tensors[f"grad.{path}"] = torch.stack([*sums, g.norm()])
    losses32, _ = train(make, loss_of, optimiser, torch.float32)
    changed = [train(make, loss_of, optimiser, torch.float32, c)[0] for c in range(1, CHANGED + 1)]
    drift = torch.stack([(c - losses32).abs() for c in changed]).amax(0).cummax(0).values
    tensors["f32.losses"], tensors["f32.drift"] = losses32, drift
    path = os.path.join(HERE, f"model_{name}.safetensors")
    save_file(tensors, path)
    print(f"{name}: loss {losses[0]:.6g} to {losses[-2]:.6g}, evaluation "
          f"{losses[-1]:.6g}, drift {drift[-1]:.2g}, float differs "
          f"by {(losses - losses32).abs().max():.2g}, {os.path.getsize(path)} bytes")


def sgd(lr, momentum, weight_decay=0.0):
    return lambda params: torch.optim.SGD(params, lr, momentum, weight_decay=weight_decay)


def adamw(lr, weight_decay=0.01):
    return lambda params: torch.optim.AdamW(params, lr, weight_decay=weight_decay)


# ------------------------------------------------------------------ models


class Level(nn.Module):
    """A level of the U-Net: convolution, norm, ReLU, then a convolution of either kind."""

    def __init__(self, first, norm, last):
        super().__init__()
        self.first, self.norm, self.last = first, norm, last

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))


class UNet(nn.Module):
    """Two levels down by max pooling, two up by transposed convolutions."""

    def __init__(self):
        super().__init__()
        conv = lambda i, o: nn.Conv1d(i, o, 3, padding=1, bias=False)
        self.down1 = Level(conv(2, 6), nn.BatchNorm1d(6), nn.Conv1d(6, 6, 3, padding=1))
        self.down2 = Level(conv(6, 8), nn.GroupNorm(4, 8), nn.Conv1d(8, 8, 3, padding=1))
        self.middle = Level(conv(8, 9), nn.BatchNorm1d(9), nn.ConvTranspose1d(9, 8, 2, stride=2))
        self.up2 = Level(conv(16, 8), nn.GroupNorm(4, 8), nn.ConvTranspose1d(8, 6, 2, stride=2))
        self.up1 = Level(conv(12, 5), nn.BatchNorm1d(5), nn.Conv1d(5, 2, 1))

    def forward(self, x):
        skip1 = F.relu(self.down1(x))
        skip2 = F.relu(self.down2(F.max_pool1d(skip1, 2)))
        x = self.middle(F.max_pool1d(skip2, 2))
        x = self.up2(torch.cat([x, skip2], 1))
        return self.up1(torch.cat([x, skip1], 1))


def unet_loss(model, step):
    clean, noise = data("clean", step, 4, 2, 16), data("noise", step, 4, 2, 16)
    return F.mse_loss(model(clean + 0.5 * noise), clean)


class Block(nn.Module):
    """ResNet's basic block; parameters have torchvision's names."""

    def __init__(self, ins, outs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outs)
        self.downsample = nn.Identity()
        if ins != outs:
            shortcut = nn.Conv2d(ins, outs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet(nn.Module):
    """ResNet-18 with narrow layers and a small stem; He et al. 2016."""

    def __init__(self, widths=(5, 10, 20, 40)):
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        for i, (ins, outs) in enumerate(zip((widths[0], *widths), widths)):
            blocks = nn.Sequential(Block(ins, outs, 2 if i else 1), Block(outs, outs, 1))
            self.add_module(f"layer{i + 1}", blocks)
        self.fc = nn.Linear(widths[3], 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet_loss(model, step):
    images, classes = data("image", step % 4, 8, 3, 32, 32), below(10, "class", step % 4, 8)
    return F.cross_entropy(model(images), classes)


class VAE(nn.Module):
    """A variational autoencoder of images (12, 12); Kingma & Welling 2014."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3, 2, 1)
        self.conv2 = nn.Conv2d(5, 6, 3, 2, 1)
        self.hidden = nn.Linear(54, 20)
        self.mean, self.logvar = nn.Linear(20, 4), nn.Linear(20, 4)
        self.widen, self.image = nn.Linear(4, 20), nn.Linear(20, 54)
        self.up1 = nn.ConvTranspose2d(6, 5, 4, 2, 1)
        self.up2 = nn.ConvTranspose2d(5, 1, 4, 2, 1)

    def forward(self, x, noise):
        y = F.relu(self.conv2(F.relu(self.conv1(x)))).flatten(1)
        y = F.relu(self.hidden(y))
        mean, logvar = self.mean(y), self.logvar(y)
        z = mean + torch.exp(0.5 * logvar) * noise
        y = F.relu(self.image(F.relu(self.widen(z)))).reshape(-1, 6, 3, 3)
        return self.up2(F.relu(self.up1(y))), mean, logvar


def vae_loss(model, step):
    images = 0.5 + 0.5 * data("image", step % 4, 6, 1, 12, 12)
    logits, mean, logvar = model(images, 1.7 * data("noise", step, 6, 4))
    error = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
    divergence = -0.5 * torch.sum(1 + logvar - mean**2 - torch.exp(logvar))
    return (error + divergence) / 6


MODELS = {
    "unet": (UNet, unet_loss, adamw(3e-3)),
    "resnet": (ResNet, resnet_loss, sgd(0.01, 0.5, 5e-4)),
    "vae": (VAE, vae_loss, adamw(3e-3)),
}

if __name__ == "__main__":
    if os.path.exists(os.path.join(HERE, "models_b.py")):
        import models_b

        MODELS.update(models_b.MODELS)
    for name in sys.argv[1:] or MODELS:
        write(name, *MODELS[name])
