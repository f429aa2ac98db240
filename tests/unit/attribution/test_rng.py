"""Random tables: the same words everywhere, one bit per sign."""

import subprocess
import sys

import numpy as np

from attribution.sketch import rng

MASK = (1 << 64) - 1


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds of Philox4x64 in plain integers, from the definition (Salmon et al. 2011, section 3.3)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(p1 >> 64) ^ c[1] ^ k[0], p1 & MASK, (p0 >> 64) ^ c[3] ^ k[1], p0 & MASK]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return c


def test_the_words_are_philox_in_plain_integers() -> None:
    import hashlib

    digest = hashlib.sha256(b"purpose").digest()
    key = [int.from_bytes(digest[i : i + 8], "little") for i in (0, 8)]
    expected = philox4x64([1, 0, 0, 0], key) + philox4x64([2, 0, 0, 0], key)  # NumPy counts before it draws
    assert rng.words("purpose", 8).tolist() == expected


def test_another_process_draws_the_same_signs() -> None:
    code = "from attribution.sketch import rng; print(rng.signs('x', 100).tolist(), rng.offset('y', 4096))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other == f"{rng.signs('x', 100).tolist()} {rng.offset('y', 4096)}\n"


def test_signs_are_balanced_and_differ_by_purpose() -> None:
    a, b = rng.signs("a", 100_000).astype(float), rng.signs("b", 100_000).astype(float)
    assert set(np.unique(a)) == {-1.0, 1.0}
    five_sigma = 5 / np.sqrt(100_000)
    assert abs(a.mean()) < five_sigma
    assert abs((a * b).mean()) < five_sigma


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert (rng.signs("a", 1000)[:77] == rng.signs("a", 77)).all()
