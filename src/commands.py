#!/usr/bin/env python3
"""Writes build/compile_commands.json, by which clangd and editors open each room of src/ without an
error: a room is compiled after those that stand before it in its header."""

import json
import os

import join

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FLAGS = ["-x", "c", "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-DTSHARD_IMPLEMENTATION",
         "-fsyntax-only"]


def commands(compiler="cc"):
    """An entry for each room. Those of tshard_uv.h come after what that includes."""
    made = []
    backend = os.path.join(TOP, "backends", "tshard_backend.h")
    for path, before in (("rooms", []), ("rooms-uv", [backend])):
        path = os.path.join(TOP, "src", path)
        for floor, room, _ in join.entries(path):
            if not room:
                continue
            file = join.path_of(path, floor, room)
            includes = [word for name in before for word in ("-include", name)]
            made.append({"directory": TOP, "file": file,
                         "arguments": [compiler] + FLAGS + includes + [file]})
            before.append(file)
    return made


if __name__ == "__main__":
    os.makedirs(os.path.join(TOP, "build"), exist_ok=True)
    with open(os.path.join(TOP, "build", "compile_commands.json"), "w", encoding="utf-8") as file:
        json.dump(commands(), file, indent=1)
