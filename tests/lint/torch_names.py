#!/usr/bin/env python3
"""The names of PyTorch that programs call most, as torch_names.txt beside this file.

    torch_names.py            prints them; says which packages it has read
    torch_names.py --write    writes torch_names.txt

Run it by a Python that has torch and the packages PROGRAMS, of whose sources it reads names alone
(by ast; nothing of them is run). A name counts where it is called, or is a class's base: of torch,
torch.nn, torch.nn.functional (F), torch.optim and torch.optim.lr_scheduler, however a file imports
them. A tensor's method counts as the torch function of its name (x.sum(), x.sum_() as torch.sum),
unless lists, texts or the like have such a method, too; those of METHODS have no torch function.
What is called of `self` or of something imported (np.sum, math.sqrt) is no tensor's method.
"""

import ast
import collections
import importlib.metadata
import importlib.util
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = os.path.join(HERE, "torch_names.txt")
PROGRAMS = ("transformers", "timm", "torchvision")  # whose use counts
WANTED = 150
MODULES = {"torch": "torch", "torch.nn": "nn", "torch.nn.functional": "F", "torch.optim": "optim",
           "torch.optim.lr_scheduler": "optim.lr_scheduler"}
METHODS = ("view", "expand", "repeat", "contiguous", "backward", "item", "size", "numpy",
           "requires_grad_", "expand_as", "view_as", "type_as", "new_zeros", "new_ones", "to",
           "float", "fill_", "copy_", "zero_", "masked_fill_", "tolist", "cpu", "cuda", "unfold")
OTHERS = (str, bytes, list, dict, set, tuple, int, float, re.Pattern, re.Match, type(os),
          collections.OrderedDict)
# Classes and functions around a model that compute nothing.
LEFT_OUT = ("torch.device", "torch.Size", "torch.dtype", "torch.Tensor", "torch.is_tensor",
            "torch.compile", "torch.set_printoptions", "torch.get_default_dtype",
            "torch.set_default_dtype", "torch.finfo", "torch.iinfo", "torch.is_floating_point",
            "torch.compiler", "torch.FloatTensor", "torch.LongTensor", "torch.IntTensor",
            "torch.BoolTensor", "torch.Generator")


class Reader(ast.NodeVisitor):
    """Counts the names that one file calls."""

    def __init__(self, counts, methods):
        self.counts, self.methods, self.known = counts, methods, {}
        self.others = {"self", "cls"}  # names that are no tensors

    def visit_Import(self, node):
        for name in node.names:
            self.others.add((name.asname or name.name).split(".")[0])
            if name.name.split(".")[0] == "torch":
                if name.asname:
                    self.known[name.asname] = name.name
                else:
                    self.known["torch"] = "torch"

    def visit_ImportFrom(self, node):
        self.others.update(name.asname or name.name for name in node.names)
        if node.module and node.module.split(".")[0] == "torch" and not node.level:
            for name in node.names:
                self.known[name.asname or name.name] = node.module + "." + name.name

    def full(self, node):
        """"torch.nn.Linear" of an expression; None if it is nothing of torch."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            begin = self.full(node.value)
            return begin + "." + node.attr if begin else None
        return None

    def count(self, node):
        name = self.full(node)
        if name:
            module, _, last = name.rpartition(".")
            if module in MODULES:
                last = re.sub(r"(?<=[a-z])_$", "", last) if module == "torch" else last
                self.counts[MODULES[module] + "." + last] += 1
        elif isinstance(node, ast.Attribute) and node.attr in self.methods and not (
                isinstance(node.value, ast.Name) and node.value.id in self.others):
            self.counts[self.methods[node.attr]] += 1

    def visit_Call(self, node):
        self.count(node.func)
        self.generic_visit(node)

    def visit_ClassDef(self, node):
        for base in node.bases:
            self.count(base)
        self.generic_visit(node)


def tensor_methods(torch):
    """{method of a tensor: what it counts as}"""
    found = {}
    for name in dir(torch.Tensor):
        base = re.sub(r"_$", "", name)
        if name.startswith("_") or any(hasattr(kind, name) for kind in OTHERS):
            continue
        if callable(getattr(torch, base, None)) and not isinstance(getattr(torch, base), type):
            found[name] = "torch." + base
    for name in METHODS:
        found.setdefault(name, "Tensor." + name)
    return found


def sources(package):
    """Paths of the package's files; none if it is not installed."""
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations if spec else []:
        for place, _, names in os.walk(folder):
            yield from (os.path.join(place, name) for name in names if name.endswith(".py"))


def main():
    try:
        import torch
    except ImportError:
        sys.exit("torch_names.py: this Python has no torch")
    counts, read, missing = collections.Counter(), [], []
    methods = tensor_methods(torch)
    for package in PROGRAMS:
        files = sorted(sources(package))
        if files:
            version = importlib.metadata.version(package)
            read.append("%s %s (%d files)" % (package, version, len(files)))
        else:
            missing.append(package)
        for path in files:
            with open(path, encoding="utf-8") as file:
                Reader(counts, methods).visit(ast.parse(file.read()))
    for name in list(counts):
        last = name.split(".")[-1]
        if name in LEFT_OUT or last.startswith("_"):
            del counts[name]
    rows = sorted(counts.items(), key=lambda row: (-row[1], row[0]))[:WANTED]
    text = "# The %d names of PyTorch %s that these call most, by torch_names.py: %s.\n" % (
        len(rows), torch.__version__.split("+")[0], ", ".join(read) or "nothing")
    if missing:
        text += "# Not installed there, so not counted: %s.\n" % ", ".join(missing)
    text += "".join("%-6d %s\n" % (count, name) for name, count in rows)
    if "--write" in sys.argv[1:]:
        with open(PAGE, "w", encoding="utf-8") as out:
            out.write(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
