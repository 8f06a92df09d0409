#!/usr/bin/env python3
"""Draws tests/bench/speed.svg, the picture in README.md, from build/bench.json.

    plot.py [--json FILE] [--svg FILE] [--table]

With --table it prints the table of the same rows in README.md's form instead. A row that the file
does not hold, or that has no peer, is left out with a line on stderr; the exit code is 1 if none
is left.
"""

import argparse
import html
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))

# name in bench.json; what it is; the peers that may stand beside it, {name: in words}; command
PEERS = {"torch": "PyTorch 2.13", "torch_f32": "PyTorch 2.13", "torch_bf16": "PyTorch 2.13",
         "torch_autocast": "PyTorch 2.13", "llamacpp": "llama.cpp",
         "one_rank": "on 1 rank", "gloo": "gloo",
         "openmpi_shm": "Open MPI", "openmpi_tcp": "Open MPI", "blis": "BLIS",
         "openblas": "OpenBLAS"}
ROWS = [("step_gpt2_T64", "GPT-2 step, 4 x 64 tokens", "bench ARGS=--only=gpt2"),
        ("step_gpt2_bf16_T256", "the same in bf16, 4 x 256", "bench ARGS=--only=gpt2"),
        ("step_nanogpt", "nanoGPT step, CPU setting", "bench ARGS=--only=nanogpt"),
        ("scaling_gpt2_tp2", "GPT-2 step, 2 ranks", "bench ARGS=--only=scaling"),
        ("decode_llama1b_bf16", "Llama 1.1 B, bf16, a token", "bench ARGS=--only=llama"),
        ("prefill_llama1b_bf16_512", "the same, a prompt of 512", "bench ARGS=--only=llama"),
        ("allreduce_threads_2_1MiB", "all-reduce 1 MiB, 2 threads", "bench ARGS=--only=comm"),
        ("allreduce_tcp_2_64MiB", "all-reduce 64 MiB, 2 ranks, TCP", "bench-comm")]
LESS = ("s", "ms", "us", "ns")  # units where less is better
TOKENS = {"step_nanogpt": 12 * 64}  # of a step: such rows, in tokens/s, are shown as ms per step


def in_words(value, unit):
    """A value with three digits, a long time in seconds or milliseconds."""
    for smaller, larger in (("ns", "us"), ("us", "ms"), ("ms", "s")):
        if unit == smaller and value >= 1000:
            value, unit = value / 1000, larger
    return "%s %s" % (("%.0f" if value >= 100 else "%.3g") % value, unit)


def comparison(row):
    """(who, its value, how many times as fast as it tshard is) of the best peer; None: no peer.
    The ratio is the median over rounds where run.py gives one, else that of the medians."""
    less = row["unit"] in LESS
    peers = {who: value for who, value in row.get("peers", {}).items()
             if who in PEERS and value}
    if not peers or not row.get("ours"):
        return None
    who = (min if less else max)(peers, key=peers.get)
    ratio = peers[who] / row["ours"] if less else row["ours"] / peers[who]
    return who, peers[who], row.get("ratio", ratio)


def in_steps(row):
    """The row, its tokens/s turned into milliseconds per step."""
    if row["name"] not in TOKENS or row["unit"] != "tokens/s":
        return row

    def ms(rate):
        return 1e3 * TOKENS[row["name"]] / rate if rate else 0

    peers = {who: ms(rate) for who, rate in row.get("peers", {}).items()}
    return dict(row, unit="ms", ours=ms(row["ours"]), peers=peers)


def chosen(rows):
    """(what, ours, peer, ratio, command) of each row of ROWS that can be compared."""
    found = {row["name"]: in_steps(row) for row in rows}
    for name, what, command in ROWS:
        row = found.get(name)
        best = row and comparison(row)
        if not best:
            print("plot: no %s for %s" % ("peer" if row else "row", name), file=sys.stderr)
            continue
        who, value, ratio = best
        yield (what, in_words(row["ours"], row["unit"]),
               "%s %s" % (in_words(value, row["unit"]), PEERS[who]), ratio, "make " + command)


def table(rows):
    lines = [("what", "tshard", "peer", "ratio", "command")]
    lines += [(what, ours, peer, "%.2g" % ratio, "`%s`" % command)
              for what, ours, peer, ratio, command in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines = ["| %s |" % " | ".join(cell.ljust(width) for cell, width in zip(line, widths))
             for line in lines]
    lines.insert(1, "|%s|" % "|".join("-" * (width + 2) for width in widths))
    return "\n".join(lines)


# ---- the picture: a bar per row, as long as the ratio; a line where both are as fast ------------

LEFT, WIDTH, BAR, GAP, TOP_SPACE = 232, 380, 16, 28, 44
STYLE = ("text{font:13px sans-serif;fill:#1f2328}.small{font-size:11px;fill:#59636e}"
         ".ours{fill:#2f6fb7}.less{fill:#b7702f}.one{stroke:#59636e;stroke-dasharray:3 3}")


def svg(rows):
    longest = max([2.0] + [ratio for *_, ratio, _ in rows])
    scale = WIDTH / longest
    height = TOP_SPACE + GAP * len(rows) + 12
    one = LEFT + scale
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 %d" width="820" height="%d" '
             'role="img" aria-label="How many times as fast as its peer tshard is">'
             % (height, height),
             "<style>%s</style>" % STYLE, '<rect width="100%" height="100%" fill="#ffffff"/>',
             '<text x="12" y="20">How many times as fast as the best peer tshard is</text>',
             '<text class="small" x="%.1f" y="38" text-anchor="middle">1: as fast</text>' % one,
             '<line class="one" x1="%.1f" x2="%.1f" y1="%d" y2="%d"/>'
             % (one, one, TOP_SPACE - 2, height - 10)]
    for number, (what, ours, peer, ratio, _) in enumerate(rows):
        top = TOP_SPACE + GAP * number
        parts += ['<text x="12" y="%d">%s</text>' % (top + 13, html.escape(what)),
                  '<rect class="%s" x="%d" y="%d" width="%.1f" height="%d"/>'
                  % ("ours" if ratio >= 1 else "less", LEFT, top, ratio * scale, BAR),
                  '<text class="small" x="%.1f" y="%d">%.2g (%s against %s)</text>'
                  % (max(LEFT + ratio * scale, one) + 6, top + 12, ratio, html.escape(ours),
                     html.escape(peer))]
    return "\n".join(parts + ["</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", default=os.path.join(TOP, "build", "bench.json"))
    parser.add_argument("--svg", default=os.path.join(HERE, "speed.svg"))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    try:
        with open(args.json, encoding="utf-8") as file:
            rows = list(chosen(json.load(file)))
    except OSError as why:
        print("plot: %s: run make bench first" % why, file=sys.stderr)
        return 1
    if not rows:
        return 1
    if args.table:
        print(table(rows))
        return 0
    with open(args.svg, "w", encoding="utf-8") as out:
        out.write(svg(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
