"""Philox words and Gumbel noise."""

import ctypes
import math

import torch

from graftline.kernels.native_library import native_library
from graftline.kernels.philox import gumbel, random_words


def test_known_answer() -> None:
    """Counter and key all zero, from Random123."""
    drawn = random_words(torch.tensor(0), torch.tensor(0), torch.arange(4))
    assert drawn.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """The paper's description in plain integers."""
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second >> 32) ^ c[1] ^ k[0], second & mask, (first >> 32) ^ c[3] ^ k[1], first & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def test_the_plain_version_knows_the_answers_of_random123() -> None:
    ones = 0xFFFFFFFF
    assert plain_philox((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert plain_philox(pi, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_words_are_philox_of_seed_position_and_id() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345]
    positions = [0, 1, 77, 2**31 + 5]
    ids = [0, 1, 2, 3, 4, 49151, 2**33 + 2]
    for seed in seeds:
        for position in positions:
            for token in ids:
                word = random_words(torch.tensor(seed), torch.tensor(position), torch.tensor(token))
                unsigned = seed % 2**64
                expected = plain_philox((token >> 2, position, 0, 0), (unsigned & 0xFFFFFFFF, unsigned >> 32))
                assert int(word) == expected[token & 3]


def test_gumbel_follows_its_formula() -> None:
    words = torch.cat([torch.tensor([0, 1, 2, 2**31, 2**32 - 1, 2**32 - 200]), torch.randint(0, 2**32, (50_000,))])
    uniform = ((words.float().double() + 0.5) / 2**32).float().double().clamp(max=1 - 2**-24)
    expected = -torch.log(-torch.log1p(-uniform))
    torch.testing.assert_close(gumbel(words).double(), expected, rtol=3e-7, atol=3e-7)
    assert gumbel(words).isfinite().all()
    assert 22.8 < float(gumbel(torch.tensor([0]))) < 22.9


def test_moments_of_the_noise() -> None:
    """Mean and variance of a standard Gumbel within five standard errors (kurtosis 5.4)."""
    n = 1 << 18
    noise = gumbel(random_words(torch.tensor(7), torch.tensor(3), torch.arange(n))).double()
    variance = math.pi**2 / 6
    assert abs(float(noise.mean()) - 0.5772156649) < 5 * math.sqrt(variance / n)
    assert abs(float(noise.var()) - variance) < 5 * variance * math.sqrt(4.4 / n)


def test_neighbouring_seeds_positions_and_ids_are_uncorrelated() -> None:
    n = 1 << 16
    ids = torch.arange(n)
    base = random_words(torch.tensor(5), torch.tensor(9), ids).double()
    others = [
        random_words(torch.tensor(6), torch.tensor(9), ids).double(),
        random_words(torch.tensor(5), torch.tensor(10), ids).double(),
        random_words(torch.tensor(5), torch.tensor(9), ids + 1).double(),
        random_words(torch.tensor(5 + 2**32), torch.tensor(9), ids).double(),
    ]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 5 / math.sqrt(n)


def test_native_noise_has_the_same_bits() -> None:
    library = native_library()
    assert library is not None
    n = 20_000
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)
    positions = torch.randint(0, 2**31, (n,), generator=generator)
    ids = torch.randint(0, 2**20, (n,), generator=generator)
    words, noise = torch.empty(n, dtype=torch.int64), torch.empty(n)
    assert isinstance(library, ctypes.CDLL)
    library.gl_noise(seeds.data_ptr(), positions.data_ptr(), ids.data_ptr(), n, words.data_ptr(), noise.data_ptr())
    expected = random_words(seeds, positions, ids)
    assert torch.equal(words, expected)
    assert torch.equal(noise, gumbel(expected))
