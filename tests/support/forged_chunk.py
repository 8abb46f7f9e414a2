"""Other content with the same XXH3-128 digest, made in microseconds: XXH3 proves nothing to an adversary.

Over long inputs XXH3 adds up, lane by lane, the words of 8 bytes and the products of their halves (each word first
XORed with a public constant), and mixes only after each block of 1024 bytes. So a block can be replaced by one whose
sums are the same. Five words of each lane are enough to set both sums to whatever is wanted.
"""

from __future__ import annotations

import random
import struct

BLOCK_BYTES, STRIPE_BYTES, WORD_BYTES = 1024, 64, 8
_STRIPES, _LANES = BLOCK_BYTES // STRIPE_BYTES, STRIPE_BYTES // WORD_BYTES
_SOLVED = 5  # words of each lane, at the end of the block
_LOW, _ALL = (1 << 32) - 1, (1 << 64) - 1
_SECRET = bytes.fromhex(  # kSecret, of the specification of XXH3
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def forged(content: bytes, block: int = 0) -> bytes:
    """Return other content with the same XXH3-128 digest: this block of 1024 bytes is different in every word.

    Args:
        content: at least one block longer than the block that is replaced.
        block: which block of 1024 bytes is replaced.
    """
    start = block * BLOCK_BYTES
    if start + BLOCK_BYTES >= len(content):
        raise ValueError("the last block is hashed otherwise")
    words = list(struct.unpack(f"<{_STRIPES * _LANES}Q", content[start : start + BLOCK_BYTES]))
    chance = random.Random(1)
    for lane in range(_LANES):
        places = range(lane, len(words), _LANES)
        keys = [_key(stripe, lane) for stripe in range(_STRIPES)]
        total = sum(words[place] for place in places)
        product = sum(_product(words[place] ^ key) for place, key in zip(places, keys, strict=True))
        for place in places[:-_SOLVED]:
            words[place] = chance.getrandbits(64)
        for place, key in zip(places[:-_SOLVED], keys, strict=False):
            total -= words[place]
            product -= _product(words[place] ^ key)
        solved = _solve(total & _ALL, product & _ALL, keys[-_SOLVED:])
        for place, word in zip(places[-_SOLVED:], solved, strict=True):
            words[place] = word
    return content[:start] + struct.pack(f"<{len(words)}Q", *words) + content[start + BLOCK_BYTES :]


def _solve(total: int, product: int, keys: list[int]) -> list[int]:
    """Five words with this sum and this sum of products, modulo 2**64."""
    one, left = product & ((1 << 31) - 1), product >> 31  # product = one * 1 + (two + three) * 2**31
    two = min(left, _LOW)
    halves = [(one, 1), (two, 1 << 31), (left - two, 1 << 31)]  # of words XORed with their keys: (high, low)
    words = [((high << 32) | low) ^ key for (high, low), key in zip(halves, keys, strict=False)]
    # Two words whose products are 0: one with any low half, one with any high half.
    high_free, low_free = keys[4] & _LOW, keys[3] & ~_LOW & _ALL  # their other halves
    low = (total - sum(words) - high_free) & _LOW
    words.append(low_free | low)
    high = ((total - sum(words) - high_free) >> 32) & _LOW
    words.append((high << 32) | high_free)
    return words


def _product(word: int) -> int:
    return (word & _LOW) * (word >> 32)


def _key(stripe: int, lane: int) -> int:
    at = WORD_BYTES * (stripe + lane)
    return int.from_bytes(_SECRET[at : at + WORD_BYTES], "little")
