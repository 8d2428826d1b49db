"""Single bits that are flipped in files, one at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


def each_flip(files: Sequence[Path], count: int, *, seed: int = 0) -> Iterator[Path]:
    """Flip a random bit of one of these files after another, each as often; yield it meanwhile, then undo it."""
    generator = random.Random(seed)
    for number in range(count):
        file = files[number % len(files)]
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        file.write_bytes(damaged)
        yield file
        file.write_bytes(whole)


def tally(files: Sequence[Path], count: int, found: Callable[[], object], unharmed: Callable[[Path], bool]) -> str:
    """Return "detected D, harmless H of N"; assert that none was neither.

    Args:
        files: to flip bits in, N in all.
        count: N.
        found: returns something true if the damage is noticed.
        unharmed: whether what is read is what was written, although nothing was noticed.
    """
    assert not found()  # before any damage
    detected = harmless = 0
    silent: list[str] = []
    for file in each_flip(files, count):
        if found():
            detected += 1
        elif unharmed(file):
            harmless += 1
        else:
            silent.append(file.name)
    assert not silent
    return f"detected {detected} and harmless {harmless} of {count} flips"
