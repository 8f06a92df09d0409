#!/usr/bin/env python3
"""Writes optimisers.safetensors beside itself: what PyTorch 2.13's optimisers, schedules and
averages compute, in double; the bits of the doubles are written as int64. test_optimisers.c
computes the same.

    python3 tests/golden/optimisers.py

"case.last": the parameters of the problem below after STEPS steps, one after the other. Of muon
also "case_exact.last": the same, but for the order of sums (exact_zeropower).
"case.rates": learning rates of the steps 0, 1, ... of a schedule.
"ema.average": averages of what AdamW computes.
"""

import math
import os
import sys

import torch
from torch.optim import _muon, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from generate import write

SHAPES = [(7, 10), (7,), (10, 7), (10,)]
STEPS = 200
torch.set_default_dtype(torch.float64)


def numbers(shape, first, function):
    n = math.prod(shape)
    return torch.tensor([function(first + i) for i in range(n)]).reshape(shape)


class Problem(torch.nn.Module):
    """The gradient of element e of all parameters in step s is
    x - sin(0.37 e e + 0.3 s e + s)."""

    def __init__(self):
        super().__init__()
        first = 0
        self.all = torch.nn.ParameterList()
        for shape in SHAPES:
            self.all.append(torch.nn.Parameter(numbers(shape, first,
                                                       lambda e: 0.1 * math.cos(0.7 * e))))
            first += math.prod(shape)

    def give(self, s):
        first = 0
        for p in self.all:
            p.grad = p.detach() - numbers(p.shape, first,
                                          lambda e: math.sin(0.37 * e * e + 0.3 * s * e + s))
            first += p.numel()

    def flat(self):
        return torch.cat([p.detach().reshape(-1) for p in self.all])


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def step(self):
        for group in self.param_groups:
            lr, (b1, b2), decay = group["lr"], group["betas"], group["weight_decay"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(b1 * m + (1 - b1) * p.grad)
                p.data = p.data * (1 - lr * decay) - lr * update
                m.copy_(b2 * m + (1 - b2) * p.grad)


def lion(params, lr, betas=(0.9, 0.99), weight_decay=0.0):
    return Lion(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class Both:
    """Muon for the matrices, AdamW for the rest."""

    def __init__(self, params, **options):
        params = list(params)
        self.each = [torch.optim.Muon([p for p in params if p.ndim == 2], **options),
                     torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.03,
                                       weight_decay=0.2)]

    def step(self):
        for optim in self.each:
            optim.step()


def bf16(x):
    return x.float().bfloat16().double()


def exact_zeropower(grad, coefficients, steps, eps):
    """torch.optim._muon._zeropower_via_newtonschulz with exact sums, rounded once to bf16, where
    PyTorch sums floats in an order that depends on the machine."""
    a, b, c = coefficients
    u = bf16(grad)
    tall = u.size(0) > u.size(1)
    u = u.T if tall else u
    u = bf16(u / bf16(u.norm()).clamp(min=bf16(torch.tensor(eps)).item()))
    for _ in range(steps):
        gram = bf16(u @ u.T)
        u = bf16(a * u + bf16(b * gram + c * (gram @ gram)) @ u)
    return u.T if tall else u


class Exact(Both):
    def step(self):
        theirs = _muon._zeropower_via_newtonschulz
        _muon._zeropower_via_newtonschulz = exact_zeropower
        super().step()
        _muon._zeropower_via_newtonschulz = theirs


O = torch.optim
MUONS = {
    "muon": {"lr": 0.02},
    "muon_rms": {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "nesterov": False,
                 "momentum": 0.4, "weight_decay": 0.0},
    "muon_steps": {"lr": 0.02, "ns_steps": 3, "ns_coefficients": (3.0, -4.0, 2.0), "eps": 1e-3,
                   "weight_decay": 0.3},
}
CASES = {
    "lion": lambda p: lion(p, 0.01, weight_decay=0.1),
    "lion_betas": lambda p: lion(p, 1e-4, (0.8, 0.9)),
    "rmsprop": lambda p: O.RMSprop(p),
    "rmsprop_momentum": lambda p: O.RMSprop(p, lr=0.005, momentum=0.9, weight_decay=0.1),
    "rmsprop_centered": lambda p: O.RMSprop(p, lr=0.005, alpha=0.9, eps=1e-3, centered=True),
    "rmsprop_all": lambda p: O.RMSprop(p, lr=0.005, momentum=0.5, centered=True,
                                       weight_decay=0.01),
    "adagrad": lambda p: O.Adagrad(p),
    "adagrad_decay": lambda p: O.Adagrad(p, lr=0.1, lr_decay=0.01, weight_decay=0.1, eps=1e-3),
    "adamax": lambda p: O.Adamax(p),
    "adamax_decay": lambda p: O.Adamax(p, lr=0.05, betas=(0.8, 0.99), weight_decay=0.1, eps=1e-4),
    "nadam": lambda p: O.NAdam(p),
    "nadam_decoupled": lambda p: O.NAdam(p, lr=0.05, weight_decay=0.1, momentum_decay=0.01,
                                         decoupled_weight_decay=True),
    "radam": lambda p: O.RAdam(p),
    "radam_decay": lambda p: O.RAdam(p, lr=0.05, weight_decay=0.1),
    "radam_decoupled": lambda p: O.RAdam(p, lr=0.05, weight_decay=0.1, betas=(0.8, 0.95),
                                         decoupled_weight_decay=True),
    "adafactor": lambda p: O.Adafactor(p),
    "adafactor_options": lambda p: O.Adafactor(p, lr=0.1, beta2_decay=-0.5, eps=(1e-3, 0.1),
                                               d=1.25, weight_decay=0.2),
    "custom": lambda p: O.AdamW(p, lr=0.05, weight_decay=0.1),
}
for NAME, OPTIONS in MUONS.items():
    CASES[NAME] = lambda p, options=OPTIONS: Both(p, **options)
    CASES[NAME + "_exact"] = lambda p, options=OPTIONS: Exact(p, **options)
SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 7, 0.5),
    "step_usual": lambda o: lr_scheduler.StepLR(o, 30),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.97),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 50, 0.01),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.4, total_steps=50),
    "one_cycle_options": lambda o: lr_scheduler.OneCycleLR(o, 0.4, total_steps=37, pct_start=0.45,
                                                           div_factor=10, final_div_factor=100),
    "one_cycle_rises": lambda o: lr_scheduler.OneCycleLR(o, 0.4, total_steps=20, pct_start=1.0),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
}
PLATEAUS = {
    "plateau": {"patience": 3},
    "plateau_usual": {},
    "plateau_max": {"mode": "max", "patience": 0, "factor": 0.5, "cooldown": 2, "min_lr": 0.01},
    "plateau_absolute": {"patience": 2, "threshold": 0.2, "threshold_mode": "abs", "factor": 0.3},
    "plateau_exact": {"mode": "max", "patience": 1, "threshold": 0.0, "threshold_mode": "abs"},
}


def rates(make):
    optim = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule, out = make(optim), []
    # the last step of OneCycleLR is total_steps - 1
    for _ in range(min(50, getattr(schedule, "total_steps", 50))):
        out.append(optim.param_groups[0]["lr"])
        optim.step()
        if len(out) < getattr(schedule, "total_steps", 51):
            schedule.step()
    return torch.tensor(out)


def plateau(options):
    optim = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule, out = lr_scheduler.ReduceLROnPlateau(optim, **options), []
    for t in range(60):
        schedule.step(2 / (1 + t % 23) + 0.1 * math.sin(t))
        out.append(optim.param_groups[0]["lr"])
    return torch.tensor(out)


def main():
    tensors = {}
    for name, make in CASES.items():
        problem = Problem()
        optim = make(problem.parameters())
        for s in range(1, STEPS + 1):
            problem.give(s)
            optim.step()
        tensors[name + ".last"] = problem.flat()
    for name, make in SCHEDULES.items():
        tensors[name + ".rates"] = rates(make)
    for name, options in PLATEAUS.items():
        tensors[name + ".rates"] = plateau(options)
    for name, decay in ("ema", 0.9), ("ema_usual", 0.999), ("ema_low", 0.3):
        problem = Problem()
        average = AveragedModel(problem, multi_avg_fn=get_ema_multi_avg_fn(decay))
        optim = torch.optim.AdamW(problem.parameters(), lr=0.05, weight_decay=0.1)
        for s in range(1, 21):
            problem.give(s)
            optim.step()
            average.update_parameters(problem)
        tensors[name + ".average"] = average.module.flat()
    write("optimisers", {key: t.view(torch.int64) for key, t in tensors.items()})


if __name__ == "__main__":
    main()
