#!/usr/bin/env python3
"""Puts a header together from its rooms.

    join.py LIST HEADER      what make tshard.h and make backends/tshard_uv.h run

LIST, a file of this folder, has a line for each floor, "floor/  what it is", and for each of its
rooms, "floor/room.h  what it is", in the order in which rooms stand in HEADER: no room uses a later
one. A line "contents" stands for the table of contents. All other lines, such as guards, are copied
as they are; rooms, too, each with an empty line after it.
"""

import os
import re
import sys

LINE = re.compile(r"([\w-]+)/(?:([\w-]+)\.h)? +(\S.*)$")
CONTENTS = """\
/* ========================================================================== */
/* >>contents                                                MARK: - contents */
/* The sections of this file, in reading order; search for ">>name".          */
/* Needs: nothing.                                                            */
/* ==========================================================================
 *
%s */

"""


def entries(path):
    """[(floor, room, what it is)] of a list, in order; room is None in the line of a floor."""
    with open(path, encoding="utf-8") as file:
        return [match.groups() for match in map(LINE.match, file) if match]


def path_of(path, floor, room):
    """The file of a room in the list at `path`."""
    return os.path.join(os.path.dirname(path), floor, room + ".h")


def contents(path):
    """The table of contents."""
    lines = [" *     >>%-15s %s\n" % (room, purpose) if room else
             " *   %-19s %s\n" % ("src/%s/" % floor, purpose)
             for floor, room, purpose in entries(path)]
    return CONTENTS % "".join(lines)


def join(path):
    """The text of the header that a list describes."""
    text = ""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            entry = LINE.match(line)
            if not entry:
                text += contents(path) if line == "contents\n" else line
            elif entry[2]:
                with open(path_of(path, entry[1], entry[2]), encoding="utf-8") as room:
                    text += room.read() + "\n"
    return text


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    text, header = join(sys.argv[1]), sys.argv[2]
    with open(header + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(header + ".new", header)


if __name__ == "__main__":
    main()
