"""Symmetries of a fabric that move rank 0 onto others, each checked on every link, and the orbits of links under them.

Fabrics without switches are tried for translations: ranks are read as numbers of several digits, and adding one to a
digit (modulo its size) must map every link to an equally fast one. So it does on rings, tori, hypercubes, circulants:
the Cayley graphs of an abelian group. Others are counted on (:mod:`.automorphism`).
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from .automorphism import automorphism
from .fabric import Arc, Fabric, Ints, Kept

LEAST_RANKS = 9


class Symmetry(NamedTuple):
    """Symmetries of a fabric that leave no rank in its place, but for the identity, which is among them.

    Attributes:
        images: where each symmetry moves every vertex.
        sources: the ranks that stand for all.
        class_of: for every link the number of its class, of those that are moved onto one another.
        times: by class, how often a path and its images use each of these links where the path uses one.
    """

    images: tuple[dict[int, int], ...]
    sources: tuple[int, ...]
    class_of: dict[Arc, int]
    times: Ints


class TranslationGroup:
    """The group of translations: ``sums[a, b]`` is the image of ``b`` under the translation that maps 0 to ``a``."""

    def __init__(self, n: int, moduli: list[int]) -> None:
        self.moduli = moduli
        places = [1, *accumulate(moduli, lambda a, b: a * b)][:-1]
        digits = [np.arange(n) // p % q for p, q in zip(places, moduli, strict=True)]
        self.sums = np.zeros((n, n), np.int64)
        for d, p, q in zip(digits, places, moduli, strict=True):
            self.sums += (d[:, None] + d[None, :]) % q * p
        self.back = np.zeros(n, np.int64)
        for d, p, q in zip(digits, places, moduli, strict=True):
            self.back += -d % q * p

    def direction(self, u: int, v: int) -> int:
        """The image of ``v`` under the translation that maps ``u`` to 0."""
        return int(self.sums[self.back[u], v])


_TRANSLATIONS: Kept[None, TranslationGroup | None] = Kept()
_SYMMETRY: Kept[None, Symmetry] = Kept()


def translations(f: Fabric) -> TranslationGroup | None:
    """The translations of a fabric without switches, checked on every link; None if it has none."""
    if len(f.vertices) > f.n or f.n < LEAST_RANKS:
        return None
    return _TRANSLATIONS.once(f, None, lambda: _translations(f))


def _translations(f: Fabric) -> TranslationGroup | None:
    found = next(_moduli(f, 1, {}), None)
    return TranslationGroup(f.n, found) if found else None


def _moduli(f: Fabric, place: int, tried: dict[tuple[int, int], bool]) -> Iterator[list[int]]:
    """Digit sizes, lowest place first, whose translations all preserve the links; large digits are tried first."""
    rest = f.n // place
    if rest == 1:
        yield []
        return
    for q in range(rest, 1, -1):
        if rest % q == 0 and tried.setdefault((place, q), _keeps(f, place, q)):
            yield from ([q, *more] for more in _moduli(f, place * q, tried))


def _keeps(f: Fabric, place: int, modulus: int) -> bool:
    """Whether adding one to this digit maps links to equally fast links."""
    v = np.arange(f.n)
    digit = v // place % modulus
    image = v + place * ((digit + 1) % modulus - digit)
    ends = np.array(list(f.arcs), np.int64)
    speed = np.array(list(f.arcs.values()), np.int64)
    codes, moved = ends @ (f.n, 1), image[ends] @ (f.n, 1)
    first, second = np.argsort(codes), np.argsort(moved)
    return bool((codes[first] == moved[second]).all() and (speed[first] == speed[second]).all())


def symmetry(f: Fabric) -> Symmetry:
    """The translations of a fabric, else what counts on from rank 0 on; kept, as several methods ask for it."""
    return _SYMMETRY.once(f, None, lambda: _symmetry(f))


def _symmetry(f: Fabric) -> Symmetry:
    group = translations(f)
    found = () if group else (automorphism(f, 0, rank) for rank in range(1, f.n))
    images = [{v: v for v in f.vertices}, *(image for image in found if image)]
    if group is not None:
        images = [dict(enumerate(row)) for row in group.sums.tolist()]
    class_of: dict[Arc, int] = {}
    times: list[int] = []
    for u, v in f.arcs:
        if (u, v) not in class_of:
            alike = {(image[u], image[v]) for image in images}
            class_of |= dict.fromkeys(alike, len(times))
            times.append(len(images) // len(alike))
    sources = tuple(r for r in range(f.n) if r == min(image[r] for image in images))
    return Symmetry(tuple(images), sources, class_of, np.array(times, np.int64))


def none(f: Fabric, root: int) -> Symmetry:
    """No symmetry but the one that moves nothing; ``root`` alone is a source."""
    class_of = {arc: k for k, arc in enumerate(f.arcs)}
    return Symmetry(({v: v for v in f.vertices},), (root,), class_of, np.ones(len(class_of), np.int64))


def regular(f: Fabric) -> Symmetry | None:
    """The symmetries, if there is one that moves rank 0 onto each rank; the last rank mostly says soon that not."""
    if automorphism(f, 0, f.n - 1) is None:
        return None
    found = symmetry(f)
    return found if found.sources == (0,) else None
