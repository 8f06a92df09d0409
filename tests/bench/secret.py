#!/usr/bin/env python3
"""What encryption costs on loopback: all-gathers of 2 processes over TCP, plain and encrypted by
turns (TSHARD_ENCRYPT=0 and 1). Small ones: microseconds more. Large ones, of which each process
sends half: the speed beside 1 / (1 / plain + 1 / encrypt + 1 / decrypt), where the rates of
AES-256-GCM are those of libsodium, measured here in records of 64 KiB. usage: secret.py [ROUNDS]"""

import ctypes
import ctypes.util
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
RECORD = 64 << 10
SMALL, LARGE = (4, 1024), (1 << 20, 128 << 20)  # bytes of both halves
CALLS = {4: 5000, 1024: 5000, 1 << 20: 200, 128 << 20: 4}


class Cipher:
    """libsodium's AES-256-GCM."""

    def __init__(self):
        self.lib = ctypes.CDLL(ctypes.util.find_library("sodium"))
        if self.lib.sodium_init() < 0 or not self.lib.crypto_aead_aes256gcm_is_available():
            raise SystemExit("this processor has no AES-256-GCM for libsodium")
        room = ctypes.create_string_buffer(1024)
        self.state = ctypes.c_void_p((ctypes.addressof(room) + 63) // 64 * 64)
        self.room, self.tag = room, ctypes.create_string_buffer(16)
        self.lib.crypto_aead_aes256gcm_beforenm(self.state, bytes(32))
        self.a, self.b = (ctypes.create_string_buffer(RECORD) for _ in range(2))

    def encrypt(self):
        return self.lib.crypto_aead_aes256gcm_encrypt_detached_afternm(
            self.b, self.tag, None, self.a, ctypes.c_ulonglong(RECORD), None, ctypes.c_ulonglong(0),
            None, bytes(12), self.state)

    def decrypt(self):
        return self.lib.crypto_aead_aes256gcm_decrypt_detached_afternm(
            self.a, None, self.b, ctypes.c_ulonglong(RECORD), self.tag, None, ctypes.c_ulonglong(0),
            bytes(12), self.state)

    def rate(self, fn):
        """Bytes per second, the median of 9."""
        found = []
        for _ in range(9):
            start = time.perf_counter()
            for _ in range(500):
                if fn() != 0:
                    raise SystemExit("the cipher fails")
            found.append(500 * RECORD / (time.perf_counter() - start))
        return statistics.median(found)


class Pair:
    """Two processes that answer commands."""

    def __init__(self, program, encrypt):
        env = dict(os.environ, TSHARD_SHM="0", TSHARD_ENCRYPT=encrypt,
                   TSHARD_KEY="a key that both have")
        self.process = subprocess.Popen([program, "2"], env=env, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def us(self, size):
        self.process.stdin.write("allgather %d %d\n" % (size, CALLS[size]))
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    cipher = Cipher()
    encrypt, decrypt = cipher.rate(cipher.encrypt), cipher.rate(cipher.decrypt)
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "bench")
        subprocess.run([os.environ.get("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O2",
                        os.path.join(HERE, "bench_comm_uv.c"), "-o", program, "-lm", "-pthread",
                        "-luv", "-lsodium"], check=True)
        pairs = [Pair(program, "0"), Pair(program, "1")]
        times = {size: [[pair.us(size) for pair in pairs] for _ in range(rounds)]
                 for size in SMALL + LARGE}
        for pair in pairs:
            pair.process.stdin.close()
            pair.process.wait(60)
    print("libsodium AES-256-GCM: encrypts %.2f GB/s, decrypts %.2f GB/s" %
          (encrypt / 1e9, decrypt / 1e9))
    for size in SMALL:
        plain, sealed = (statistics.median(one) for one in zip(*times[size]))
        print("%9d B: plain %.2f us, encrypted %.2f us: %.2f us more" %
              (size, plain, sealed, sealed - plain))
    for size in LARGE:
        plain, sealed = (size / 2 / statistics.median(one) * 1e6 for one in zip(*times[size]))
        most = 1 / (1 / plain + 1 / encrypt + 1 / decrypt)
        print("%9d B: plain %.2f GB/s, encrypted %.2f GB/s: %.2f of %.2f" %
              (size, plain / 1e9, sealed / 1e9, sealed / most, most / 1e9))


if __name__ == "__main__":
    main()
