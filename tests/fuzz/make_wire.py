#!/usr/bin/env python3
"""Writes the seeds of fuzz_wire.c into the folder wire: the state of a rank, and what happens."""

import os
import struct

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "wire")
RANKS = 4
(BYTES, MESSAGE, STRANGER, CLAIM, GREET, ANSWER, START, DATA, TEST, LATER, END, SPLIT, STUCK,
 ABORT) = range(14)
(BEAT, HERE, MISSING, TABLE, READY, GO, ACCUSE, ASK, TELL, STUCK_IN, CONFIRM, STILL, VERDICT,
 BYE, AWAIT, LINKED) = range(16)  # control messages
JOIN, CONTROL, LINK, MESSAGES = range(4)  # purposes of a connection
(WELCOME, OTHER_KEY, OTHER_VERSION, OTHER_JOB, OTHER_SIZE, OTHER_RANK, TAKEN,
 UNKNOWN) = range(8)  # answers
RIGHT, REPLAYED, REFLECTED, NONE = range(4)  # proofs
LATE, SILENT, CROSSED, MISMATCH, GONE, DAMAGED, ABORTED = range(1, 8)  # claims against a rank
ERR_MISMATCH, ERR_LOST, ERR_ABORTED = 8, 9, 11
ALLREDUCE, ALLGATHER, REDUCE_SCATTER, BROADCAST, ALLTOALL, SEND, RECV, SENDRECV, BARRIER = range(9)
NOTHING, ONE, THREE, SOME, RING, LONG = range(6)  # sizes of a collective
ALL = 65535  # of a payload: as much as the collective takes


def state(rank, complete=False, table=False, peers=(), sealed=False):
    """Connections are numbered as they come: those of the peers that are there, by rank; a
    listener (in a world that forms, once rank 0 is known); calls and those who come. At the first
    collective data connections by rank, then those for messages. sealed: the control connections
    of a complete world are encrypted."""
    return bytes([rank | complete << 2 | table << 3 | sealed << 4 |
                  sum(16 << peer for peer in peers)])


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff


def text(words):
    return struct.pack("<H", len(words)) + words.encode()


def error(code, rank, words):
    return struct.pack("<Bi", code, rank) + text(words)


def bytes_of(which, data):
    return struct.pack("<BBH", BYTES, which, len(data)) + data


def message(which, kind, data=b""):
    return struct.pack("<BBBH", MESSAGE, which, kind, len(data)) + data


def changes(pairs):
    return bytes([len(pairs)]) + b"".join(bytes(pair) for pair in pairs)


def claim(which, client, purpose, *pairs, proof=RIGHT):
    """pairs: (place, bits) of the claim that are changed before it is proven."""
    return bytes([CLAIM, which, client, purpose]) + changes(pairs) + bytes([proof])


def comes(which, client, purpose, *pairs, proof=RIGHT):
    return bytes([STRANGER]) + claim(which, client, purpose, *pairs, proof=proof)


def greet(which, *pairs):
    return bytes([GREET, which]) + changes(pairs)


def answer(which, status, value=0, proof=RIGHT):
    return bytes([ANSWER, which, status, value, proof]) + changes([])


def here(which, port):
    return message(which, HERE, text("127.0.0.1") + struct.pack("<H", port))


def start(kind, size, peer=0, checks=False, sealed=False, aes=False):
    """checks: the data connections, which the first collective makes, have checksums; sealed: they
    are encrypted, by AES or by ChaCha20."""
    return bytes([START, kind, size, peer | checks << 7 | sealed << 6 | aes << 5])


def data(link, payload=0, *pairs):
    """The header that is expected on a data connection (of messages: link 4 and above), changed,
    and as many bytes."""
    return bytes([DATA, link]) + changes(pairs) + struct.pack("<H", payload)


def later(exponent, beats=True):
    """2^exponent ms"""
    return bytes([LATER, exponent | beats << 7])


def end(which):
    return bytes([END, which])


def accuse(of, claim_of, code, rank, group=0, seq=0):
    return message(of, ACCUSE, struct.pack("<BQQ", claim_of, group, seq) +
                   error(code, rank, "rank %d is at fault" % rank))


def tell(of, rank, digest, kind=ALLREDUCE, counts=()):
    return message(of, TELL, struct.pack("<QQBiQBBBqqiiB", 1, 0, 3, rank, digest, kind, 1, 0, 7,
                                         1, -1, -1, len(counts)) +
                   b"".join(struct.pack("<qq", *pair) for pair in counts))


def stuck(of, wait, peer=-1, sends=0, seq=0, started=9, pairs=()):
    """Stuck in a message with peer, or (-1) in a collective of the world."""
    return message(of, STUCK_IN, struct.pack("<QQQiB", wait, 1, seq, peer, sends) +
                   text("receive" if peer >= 0 else "barrier") +
                   struct.pack("<5i", RANKS, *range(RANKS)) +
                   struct.pack("<iQQ", 1, 1, started) + struct.pack("<i", len(pairs)) +
                   b"".join(struct.pack("<QQQi", 1, *pair) for pair in pairs))


def still(of, wait, is_still=1):
    return message(of, STILL, struct.pack("<QB", wait, is_still))


HOSTS = (0, 0, 2, 2)  # ranks 0 and 1 are on one, ranks 2 and 3 on another


def ready(rank, host):
    return message(rank, READY, struct.pack("<H", host))


def formed_by_0(hosts=HOSTS):
    joins = b"".join(comes(r, r, JOIN) for r in (1, 2, 3))
    places = b"".join(here(r, 4000 + r) for r in (1, 2, 3))
    links = b"".join(comes(2 * r + 2 + m, r, LINK + m) for r in (1, 2, 3) for m in (0, 1))
    return state(0) + joins + places + links + b"".join(
        ready(r, host) for r, host in enumerate(hosts) if r > 0)


def addresses():
    return b"t" * 32 + b"".join(text("127.0.0.1") + struct.pack("<H", 4000 + r) for r in (1, 2, 3))


def joined(rank):
    """The call to rank 0 succeeds, and the table comes."""
    return state(rank) + greet(0) + answer(0, WELCOME) + message(0, TABLE, addresses())


def formed_by_2():
    calls = b"".join(greet(e) for e in range(2, 7)) + b"".join(
        answer(e, WELCOME) for e in range(2, 7))
    comers = b"".join(comes(7 + i, 3, purpose) for i, purpose in
                      enumerate((CONTROL, LINK, MESSAGES)))
    return joined(2) + calls + comers + message(0, GO, struct.pack("<4H", *HOSTS))


def split():
    tickets = b"".join(struct.pack("<BBH", 0, r, 5000 + r) for r in range(RANKS))
    comers = b"".join(comes(4 + i, r, LINK + m) for i, (r, m) in
                      enumerate((r, m) for r in (1, 2, 3) for m in (0, 1)))
    linked = b"".join(message(r - 1, LINKED, struct.pack("<Q", 7)) for r in (1, 2, 3))
    return bytes([SPLIT]) + tickets + comers + linked


def seeds():
    running, zero = state(0, complete=True), state(0)
    yield "formed_by_0", formed_by_0()
    yield "formed_by_2", formed_by_2()
    yield "unknown_host", formed_by_0((0, 2, 2, 2))
    # who comes
    yield "wrong_key", zero + comes(1, 1, JOIN, proof=NONE)
    yield "replayed", zero + comes(1, 1, JOIN, proof=REPLAYED)
    yield "reflected", zero + comes(1, 1, JOIN, proof=REFLECTED)
    yield "other_version", zero + comes(1, 1, JOIN, (4, 2))
    yield "other_job", zero + comes(1, 1, JOIN, (64, 1))
    yield "other_size", zero + comes(1, 1, JOIN, (48, 12))
    yield "other_rank", zero + comes(1, 1, JOIN, (44, 3))
    yield "negative_rank", zero + comes(1, 0, JOIN, (43, 128), (40, 255))
    yield "other_purpose", state(0, table=True) + comes(1, 1, JOIN, (55, 64))
    yield "twice", zero + comes(1, 1, JOIN) + comes(2, 1, JOIN, (72, 8))
    yield "again", zero + comes(1, 1, JOIN) + comes(2, 1, JOIN)
    yield "again_after_use", zero + comes(1, 1, JOIN) + here(1, 4001) + comes(2, 1, JOIN)
    yield "http", zero + bytes([STRANGER]) + bytes_of(1, b"GET / HTTP/1.1\r\n\r\n")
    yield "one_byte", zero + bytes([STRANGER]) + bytes_of(1, b"T") + later(13)
    yield "came_and_went", zero + bytes([STRANGER]) + end(1)
    yield "crowd", zero + bytes([STRANGER]) * 70 + claim(70, 1, JOIN)
    yield "before_the_table", state(2, peers=[0]) + comes(2, 3, LINK) + comes(3, 3, CONTROL) + \
        message(0, TABLE, addresses())
    # who is called
    for status, name in ((OTHER_KEY, "key"), (OTHER_JOB, "job"), (OTHER_SIZE, "size"),
                         (OTHER_RANK, "rank"), (TAKEN, "taken"), (UNKNOWN, "unknown")):
        yield "refused_" + name, state(1) + greet(0) + answer(0, status, 5)
    yield "greeted_by_another", state(1) + bytes_of(0, b"220 mail.example ESMTP ready to serve you")
    yield "greeted_by_version_2", state(1) + greet(0, (4, 1))
    yield "answered_without_proof", state(1) + greet(0) + answer(0, WELCOME, proof=NONE)
    yield "never_answered", state(1) + later(12) + later(15)
    # while it forms
    yield "left", zero + comes(1, 1, JOIN) + message(1, BYE)
    yield "absent", zero + comes(1, 1, JOIN) + later(15)
    yield "unready", formed_by_0()[:-14] + later(15)
    yield "told_who_is_absent", state(1, peers=[0]) + message(0, MISSING, text(" 2 3")) + later(15)
    # control messages
    yield "ended", running + end(1)
    yield "silent", running + later(14, beats=False)
    yield "left_later", running + b"".join(message(r, BYE) + end(r) for r in range(3))
    yield "verdict", state(3, complete=True) + message(0, VERDICT, error(ERR_LOST, 1, "gone"))
    yield "abort", state(2, complete=True) + bytes([ABORT])
    yield "asked", running + start(ALLREDUCE, ONE) + message(2, ASK, struct.pack("<QQ", 1, 0))
    yield "accused", running + accuse(0, GONE, ERR_LOST, 2)
    yield "accused_too_late", running + accuse(0, GONE, ERR_LOST, 2) + later(10) + \
        accuse(1, GONE, ERR_LOST, 3)
    yield "outranked", running + accuse(0, SILENT, ERR_LOST, 1) + accuse(2, GONE, ERR_LOST, 2)
    yield "odd", running + start(ALLREDUCE, ONE) + accuse(1, MISMATCH, ERR_MISMATCH, 2, 1) + \
        tell(0, 1, 7) + tell(1, 2, 7) + tell(2, 3, 7)
    yield "unequal", running + accuse(1, MISMATCH, ERR_MISMATCH, 2, 1) + b"".join(
            tell(r - 1, r, 7, ALLTOALL, [(1, 1), (1, r), (1, 1), (1, 1)]) for r in (1, 2, 3))
    pair = stuck(0, 1, peer=2) + stuck(1, 1, peer=1)
    yield "circle", running + pair + still(0, 1) + still(1, 1)
    yield "circle_that_broke", running + pair + still(0, 1, 0) + still(1, 1)
    yield "circle_that_changed", running + pair + stuck(0, 2, peer=3) + still(0, 2) + still(1, 1)
    yield "circle_with_the_arbiter", running + start(RECV, ONE, 1) + bytes([STUCK, 0]) + \
        stuck(0, 1, peer=0) + still(0, 1)
    yield "no_circle", running + stuck(0, 1, peer=2) + stuck(1, 1, peer=1, pairs=[(1, 0, 1)])
    yield "crossed", running + stuck(0, 1, seq=4, started=5) + \
        stuck(1, 1, peer=1, started=4, pairs=[(0, 1, 3), (0, 1, 1)]) + still(0, 1) + still(1, 1)
    yield "confirmed", state(3, complete=True) + start(RECV, ONE, 1) + bytes([STUCK, 0]) + \
        message(0, CONFIRM, struct.pack("<Q", 1))
    awaits = message(1, AWAIT, struct.pack("<QQB", 1, 0, LINK))
    yield "awaited", running + start(ALLREDUCE, ONE) + awaits + data(1, ALL) + data(2, ALL) + \
        data(3, ALL) + awaits + message(1, AWAIT, struct.pack("<QQB", 9, 0, LINK)) + bytes([TEST])
    yield "forgotten", running + start(ALLREDUCE, ONE) + (awaits + later(12)) * 4
    yield "no_such_message", running + message(0, 16)
    head = struct.pack("<IB", 60001, BEAT)
    yield "too_long", running + bytes_of(0, head + struct.pack("<I", crc32c(head)))
    yield "damaged_message", running + bytes_of(0, head + b"\0\0\0\0")
    head = struct.pack("<IB", 0, BEAT)
    yield "damaged_payload", running + bytes_of(
        0, head + struct.pack("<I", crc32c(head)) + b"\0\0\0\0")
    yield "cut", running + message(0, ACCUSE, b"\3\1\0")
    # data connections
    direct = b"".join(data(r, 12) for r in (1, 2, 3))
    yield "direct", running + start(ALLREDUCE, THREE) + direct + bytes([TEST])
    yield "ring", running + start(ALLREDUCE, RING) + data(3, ALL) + bytes([TEST])
    yield "gathered_in_a_ring", running + start(ALLGATHER, RING) + data(3, ALL) + bytes([TEST])
    yield "scattered_in_a_ring", running + start(REDUCE_SCATTER, RING) + data(3, ALL) + \
        bytes([TEST])
    yield "gathered", running + start(ALLGATHER, SOME) + b"".join(
        data(r, 256) for r in (1, 2, 3)) + bytes([TEST])
    yield "broadcast", running + start(BROADCAST, SOME, 2) + data(2, 256) + data(3) + bytes([TEST])
    yield "in_one_go", running + start(BARRIER, ONE) + start(ALLREDUCE, ONE) + b"".join(
        data(r) for r in (1, 2, 3)) + bytes([TEST]) + b"".join(
            data(r, 4) for r in (1, 2, 3)) + bytes([TEST])
    yield "checked", running + start(ALLREDUCE, THREE, checks=True) + direct + bytes([TEST])
    yield "checked_in_a_ring", running + start(ALLREDUCE, RING, checks=True) + data(3, ALL) + \
        bytes([TEST])
    yield "checked_message", running + start(RECV, SOME, 1, checks=True) + data(5, 256) + \
        bytes([TEST])
    yield "damaged_header", running + start(ALLREDUCE, THREE, checks=True) + \
        data(1, 12, (31, 128), (53, 1)) + bytes([TEST])
    yield "damaged_data", running + start(RECV, SOME, 1, checks=True) + data(5) + \
        bytes_of(6, b"1" * 300) + bytes([TEST])
    yield "other_digest", running + start(ALLREDUCE, THREE) + data(1, 12, (16, 1)) + bytes([TEST])
    yield "other_bytes", running + start(ALLREDUCE, THREE) + data(1, 12, (31, 128)) + bytes([TEST])
    yield "received", running + start(RECV, SOME, 1) + data(5, 256) + bytes([TEST])
    yield "sent", running + start(SEND, SOME, 1) + data(5) + bytes([TEST])
    yield "to_itself", running + start(SEND, SOME, 0) + start(RECV, SOME, 0) + bytes([TEST])
    yield "unfit", running + start(SEND, SOME, 1) + data(5, 0, (32, 1)) + bytes([TEST])
    yield "unfit_to_itself", running + start(SEND, SOME, 0) + start(RECV, ONE, 0) + bytes([TEST])
    yield "unasked", running + start(RECV, ONE, 1) + data(5, 4, (24, 1)) + bytes([TEST])
    yield "data_ended", running + start(BARRIER, NOTHING) + end(3) + bytes([TEST])
    yield "late", running + start(BARRIER, NOTHING) + later(15) + bytes([TEST])
    yield "late_in_a_send", running + start(SEND, LONG, 1) + data(5) + bytes([TEST]) + later(15) + \
        bytes([TEST])
    yield "split", running + split()
    # encrypted connections
    sealed, wants_sealed, wants_aes = state(0, complete=True, sealed=True), (80, 2), (80, 6)
    yield "sealed_join", zero + comes(1, 1, JOIN, wants_sealed) + message(1, BYE)
    yield "sealed_join_by_aes", zero + comes(1, 1, JOIN, wants_aes) + message(1, BYE)
    yield "sealed_call", state(1) + greet(0) + answer(0, WELCOME, 2) + \
        message(0, MISSING, text(" 2 3")) + later(15)
    yield "sealed_without_a_key", zero + comes(1, 1, JOIN, wants_sealed, proof=NONE)
    yield "sealed_share_changed", zero + comes(1, 1, JOIN, wants_sealed, (9, 1))
    yield "sealed_share_of_zeros", state(1) + bytes_of(0, b"tshd\4\0st" + bytes(32))
    yield "sealed_verdict", state(3, complete=True, sealed=True) + \
        message(0, VERDICT, error(ERR_LOST, 1, "gone"))
    yield "sealed_message_damaged", sealed + bytes_of(0, b"1" * 40)
    yield "sealed_message_in_the_clear", sealed + bytes_of(
        0, head + struct.pack("<I", crc32c(head)) + bytes(12))
    for aes in (False, True):
        by = "_by_aes" if aes else ""
        yield "sealed_direct" + by, running + start(ALLREDUCE, THREE, sealed=True, aes=aes) + \
            direct + bytes([TEST])
        yield "sealed_ring" + by, running + start(ALLREDUCE, RING, sealed=True, aes=aes) + \
            data(3, ALL) + bytes([TEST])
        yield "sealed_received" + by, running + start(RECV, SOME, 1, sealed=True, aes=aes) + \
            data(5, 256) + bytes([TEST])
    yield "sealed_sent", running + start(SEND, SOME, 1, sealed=True) + data(5) + bytes([TEST])
    yield "sealed_header_damaged", running + start(ALLREDUCE, THREE, sealed=True) + \
        bytes_of(3, b"1" * 100) + bytes([TEST])
    yield "sealed_data_damaged", running + start(RECV, SOME, 1, sealed=True) + data(5) + \
        bytes_of(6, b"1" * 300) + bytes([TEST])
    yield "sealed_ended", running + start(ALLREDUCE, THREE, sealed=True) + bytes_of(3, b"1") + \
        end(3) + bytes([TEST, TEST])


def main():
    os.makedirs(FOLDER, exist_ok=True)
    for name, seed in seeds():
        with open(os.path.join(FOLDER, name), "wb") as out:
            out.write(seed + later(10))  # so that evidence becomes a verdict


if __name__ == "__main__":
    main()
