"""Charsmaps as sentencepiece writes them, and the normalizer Precompiled reads: the size of a trie
in bytes, the trie, a double array of darts-clone's with 32 bits per unit, and the results, each
with a zero after it. A key's value in the trie is where its result begins."""

import struct


def charsmap(rows):
    """Of a dict from text to what replaces it; it has at least one."""
    trie, results = {}, b""
    for key, result in rows.items():
        node = trie
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node[None] = len(results)
        results += result.encode() + b"\0"
    units, used = {0: 0}, {0}

    def place(at, node):
        """The children of a node stand at its offset, each moved by its byte; a leaf by 0."""
        offset = next(
            i
            for i in range(1, 1 << 21)
            if all((at ^ i ^ (byte or 0)) not in used for byte in node)
        )
        units[at] |= offset << 10 | (None in node) << 8
        for byte, child in node.items():
            used.add(at ^ offset ^ (byte or 0))
            units[at ^ offset ^ (byte or 0)] = child | 1 << 31 if byte is None else byte
        for byte, child in node.items():
            if byte is not None:
                place(at ^ offset ^ byte, child)

    place(0, trie)
    count = (max(units) | 255) + 1
    packed = struct.pack("<%dI" % count, *(units.get(i, 0) for i in range(count)))
    return struct.pack("<I", len(packed)) + packed + results
