#!/usr/bin/env python3
"""The rooms of src/: what each of them uses, and a picture of the floors.

    floors.py            prints what is wrong; the exit code is 1 if something is
    floors.py --needs    makes each room's line "Needs: >>..." the shortest that is true
    floors.py --write    draws src/floors.svg from these lines

A room uses another if it names a function, type, constant or macro that is defined there. Its line
"Needs:" names rooms that come before it, and through their lines all that it uses.
"""

import os
import re
import sys
import textwrap

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(TOP, "src"))
import join

LISTS = {"src/rooms": "tshard.h", "src/rooms-uv": "backends/tshard_uv.h"}
PICTURE = "src/floors.svg"
NEEDS = re.compile(r"^/\* Needs: .*?(?=\n/\* ===)", re.M | re.S)
# What defines a name that begins with tsh_, tshi_ or TSHI_: a macro; the tag or the end of a type;
# a constant; a table; a function with its body.
DEFINES = [re.compile(form, re.M | re.S) for form in (
    r"^[ \t]*# *define (\w+)", r"\b(?:struct|union|enum) (\w+) *\{", r"^\} (\w+);",
    r"^typedef [^;{}]*?\(?\*?\b(\w+)\)?(?:\([^;{}]*\))?;",
    r"[{,\n] *(TSHI_\w+)(?= *(?:=[^,}]*)?[,}\n])",
    r"^static const [^;{}()=]*?\b(\w+)(?:\[[^]]*\])* =",
    r"^[A-Z]?[\w (),*]*?\b(tshi?_\w+)\([^;{}]*\) \{")]
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="880" height="%d" viewBox="0 0 880 %d">
<!-- drawn by tests/lint/floors.py from src/rooms and the rooms' lines "Needs:" -->
<style>text { font: 13px sans-serif } .title { font-weight: bold } .rooms { fill: #456; font-size:
12px } rect { fill: #eef3f8; stroke: #9ab } path { fill: none; stroke: #678; marker-end: url(#end) }
.up { stroke: #c00 }</style>
<defs><marker id="end" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">
<polygon points="0 0 6 3 0 6" fill="#678"/></marker></defs>
<rect style="fill: white; stroke: none" width="880" height="%d"/>
%s
</svg>
"""
NAME = re.compile(r"\b(?:tshi?|TSHI)_\w+")


class Room:
    def __init__(self, path, floor, name):
        self.path, self.floor, self.name = path, floor, name
        with open(path, encoding="utf-8") as file:
            self.text = file.read()
        self.code = re.sub(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"', " ", self.text, flags=re.S)
        self.code = re.sub(r"\((tsh_\w+)\)\(", r"\1(", self.code)  # (tsh_open): a macro, too
        needs = NEEDS.search(self.text)
        self.needs = re.findall(r">>([\w-]+)", needs[0]) if needs else None


def read(top, path):
    """The rooms of a list, in order."""
    path = os.path.join(top, path)
    return [Room(join.path_of(path, floor, name), floor, name)
            for floor, name, _ in join.entries(path) if name]


def is_public(room):
    """Whether a room declares what all others may use without saying so."""
    return room.floor == "1-api" or room.name in ("uv-manual", "uv-api")


def uses(rooms):
    """{room's name: {name of a room that it uses: the names that it uses of it}}."""
    defined, found = {}, {}
    for room in rooms:
        for name in [] if is_public(room) or room.name == "end" else {
                match[1] for form in DEFINES for match in form.finditer(room.code)}:
            if NAME.fullmatch(name) and "struct %s {" % name not in room.code.replace(
                    "struct tshi_", ""):  # public handles are declared in src/1-api
                defined.setdefault(name, room.name)
    for room in rooms:
        found[room.name] = {}
        code = re.sub(r"\bstruct \w+ \*", "", room.code)  # a pointer to what it does not look into
        for name in sorted(set(NAME.findall(code))) if room.name != "end" else []:
            at = defined.get(name, room.name)
            if at != room.name and not is_public(room):
                found[room.name].setdefault(at, []).append(name)
    return found


def reach(rooms):
    """{room's name: all that it needs, and these need}."""
    reached = {}
    for room in rooms:
        reached[room.name] = set(room.needs or ())
        for name in room.needs or ():
            reached[room.name] |= reached.get(name, set())
    return reached


def check(top=TOP):
    """(path, what is wrong) of every list."""
    for path in LISTS:
        rooms, before = read(top, path), set()
        used, reached = uses(rooms), reach(rooms)
        for room in rooms:
            if room.needs is None:
                yield room.path, "does not say what it needs"
            for name in set(room.needs or ()) - before:
                yield room.path, "needs %s, which is no earlier room" % name
            for name, what in used[room.name].items():
                if name not in before:
                    yield room.path, "uses %s of the later room %s" % (", ".join(what), name)
                elif name not in reached[room.name]:
                    yield room.path, "uses %s of %s: floors.py --needs" % (", ".join(what), name)
            before.add(room.name)
    with open(os.path.join(top, PICTURE), encoding="utf-8") as file:
        if file.read() != draw(top):
            yield os.path.join(top, PICTURE), "is out of date: tests/lint/floors.py --write"


def write_needs(top=TOP):
    """Rewrites the lines of all private rooms."""
    for path in LISTS:
        rooms = read(top, path)
        used, order = uses(rooms), [room.name for room in rooms]
        for room in rooms:
            if is_public(room) or room.name == "end":
                continue
            wanted, reached = sorted(used[room.name], key=order.index), reach(rooms)
            wanted = [name for name in wanted
                      if not any(name in reached[other] for other in wanted if other != name)]
            room.needs = wanted or room.needs
            says = textwrap.wrap("Needs: %s." % " ".join(">>" + name for name in room.needs), 74)
            lines = "\n".join("/* %-74s */" % line for line in says)
            text = NEEDS.sub(lines, room.text, count=1)
            with open(room.path, "w", encoding="utf-8") as file:
                file.write(text)


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def draw(top=TOP):
    """The floors of tshard.h, the lowest at the bottom, with an arrow to each floor that the rooms'
    lines name."""
    rooms = read(top, "src/rooms")
    titles = [(floor, says) for floor, room, says in join.entries(os.path.join(top, "src/rooms"))
              if not room]
    floor_of = {room.name: room.floor for room in rooms}
    arrows = sorted({(room.floor, floor_of[name]) for room in rooms for name in room.needs or ()
                     if floor_of[name] != room.floor})
    parts, y, middle = [], 10, {}
    for floor, says in reversed(titles):
        names = textwrap.wrap(", ".join(room.name for room in rooms if room.floor == floor), 100,
                              break_on_hyphens=False)
        height = 34 + 17 * len(names)
        parts.append('<rect x="10" y="%d" width="690" height="%d" rx="4"/>' % (y, height))
        parts.append('<text class="title" x="20" y="%d">src/%s</text>' % (y + 20, floor))
        parts.append('<text x="150" y="%d">%s</text>' % (y + 20, escape(says)))
        parts += ['<text class="rooms" x="20" y="%d">%s</text>' % (y + 40 + 17 * i, line)
                  for i, line in enumerate(names)]
        middle[floor] = (y, height)
        y += height + 12
    order, out = [floor for floor, _ in titles], {}
    for above, below in arrows:  # the longer the way, the further right
        out[above] = out.get(above, 0) + 1
        start = middle[above][0] + middle[above][1] / 2 + 4 * out[above] - 8
        end = middle[below][0] + middle[below][1] / 2 + 2 * order.index(above) - 10
        wide = 700 + 18 * abs(order.index(above) - order.index(below)) + 10
        up = ' class="up"' if order.index(above) < order.index(below) else ""
        parts.append('<path%s d="M700 %.0f C%d %.0f %d %.0f 702 %.0f"/>'
                     % (up, start, wide, start, wide, end, end))
    return SVG % (y, y, y, "\n".join(parts))


if __name__ == "__main__":
    if "--needs" in sys.argv[1:]:
        write_needs()
    if "--write" in sys.argv[1:]:
        with open(os.path.join(TOP, PICTURE), "w", encoding="utf-8") as picture:
            picture.write(draw())
    wrong = list(check())
    for path, what in wrong:
        print("%s: %s" % (os.path.relpath(path, TOP), what))
    sys.exit(1 if wrong else 0)
