"""Names and shapes of stored tensors, when they are not those of the module.

A wrapper adds words to a name, which `stored_names` removes. transformers 5 also fuses tensors while it loads them, and
`save_pretrained` splits them again. A `Mosaic` records that as boxes of the stored tensor, each a strided view of a
tensor of the module. So a rank that holds a part of a fused tensor can say which boxes of stored tensors it holds.

    experts.gate_up_proj (E, 2I, H), the module's          experts.1.up_proj.weight (I, H), stored:
    a rank holds experts 0 and 1: (2, 2I, H)               one piece, from element (1, I, 0), strides (H, 1)

A mosaic has the same operations as a torch tensor: `narrow`, `permute`, `view`, `cat` and so on. None of them touches a
value. `parts_of_box` does the rest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.errors import SaveRefused
from cluster.layouts.region import Box
from storage.problems import Problems, quote

_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_DATA_PARALLEL = "module."

Change = Callable[[tuple[int, ...]], tuple[int, ...]]  # of the value that each dimension has


def stored_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name without what wrappers of a module add to it.

    Those are `_orig_mod.` of torch.compile, `_fsdp_wrapped_module.` of FSDP1, `_checkpoint_wrapped_module.` of
    activation checkpointing, and `module.` of DataParallel, DDP and DeepSpeed where every name begins with it.

    Args:
        names: The names of a module's state dict.

    Returns:
        Given name to stored name, in the same order.

    Raises:
        SaveRefused: Two names have the same stored name.
    """
    short = {name: _WRAPPERS.sub("", name) for name in names}
    while short and all(name.startswith(_DATA_PARALLEL) for name in short.values()):
        short = {name: _WRAPPERS.sub("", stored.removeprefix(_DATA_PARALLEL)) for name, stored in short.items()}
    given: defaultdict[str, list[str]] = defaultdict(list)
    for name, stored in short.items():
        given[stored].append(name)
    problems = Problems()
    for stored, several in given.items():
        if len(several) > 1:
            problems.add(f"{quote(stored)} would be stored for {' and '.join(map(quote, several))}")
    if problems:
        raise SaveRefused(f"tensors have the same name without the names of wrappers: {problems}")
    return short


@dataclass(frozen=True, slots=True)
class MosaicPiece:
    """A box of a mosaic: a strided view of one source tensor, which is in row-major order."""

    at: tuple[int, ...]  # offsets in the mosaic
    sizes: tuple[int, ...]
    source: str
    start: int  # element of the source, counted in its row-major order
    strides: tuple[int, ...]  # elements of the source from one index to the next, per dimension


@dataclass(frozen=True, slots=True)
class Mosaic:
    """A tensor made of views of others. The pieces cover it, and do not overlap."""

    shape: tuple[int, ...]
    pieces: tuple[MosaicPiece, ...]  # none if the tensor is empty

    @classmethod
    def of(cls, source: str, shape: Sequence[int]) -> Mosaic:
        """Return a tensor as it is: one piece."""
        sizes = tuple(shape)
        if 0 in sizes:
            return cls(sizes, ())
        return cls(sizes, (MosaicPiece((0,) * len(sizes), sizes, source, 0, row_major(sizes)),))

    def is_whole(self, source: str, shape: Sequence[int]) -> bool:
        """Return whether it is that tensor, unchanged."""
        return self == Mosaic.of(source, shape)

    def narrow(self, dim: int, first: int, end: int, step: int = 1) -> Mosaic:
        """Return the indices first, first + step, ... below `end` of a dimension."""
        pieces = []
        for piece in self.pieces:
            at = piece.at[dim]
            low = max(0, -((first - at) // step))  # the first index of the result that lies in the piece
            high = -(-(min(end, at + piece.sizes[dim]) - first) // step)
            if low < high:
                moved = piece.start + (first + low * step - at) * piece.strides[dim]
                pieces.append(
                    MosaicPiece(
                        _put(piece.at, dim, low),
                        _put(piece.sizes, dim, high - low),
                        piece.source,
                        moved,
                        _put(piece.strides, dim, piece.strides[dim] * step),
                    )
                )
        return Mosaic(_put(self.shape, dim, max(0, -(-(end - first) // step))), tuple(pieces))

    def select(self, dim: int, index: int) -> Mosaic:
        """Return one index of a dimension, which goes."""
        return self.narrow(dim, index, index + 1).squeeze(dim)

    def squeeze(self, dim: int) -> Mosaic:
        """Return it without a dimension of size 1."""
        return self._per_dimension(lambda values: (*values[:dim], *values[dim + 1 :]))

    def unsqueeze(self, dim: int) -> Mosaic:
        """Return it with one more dimension, of size 1, before `dim`."""
        pieces = tuple(
            MosaicPiece(
                (*piece.at[:dim], 0, *piece.at[dim:]),
                (*piece.sizes[:dim], 1, *piece.sizes[dim:]),
                piece.source,
                piece.start,
                (*piece.strides[:dim], 0, *piece.strides[dim:]),
            )
            for piece in self.pieces
        )
        return Mosaic((*self.shape[:dim], 1, *self.shape[dim:]), pieces)

    def permute(self, order: Sequence[int]) -> Mosaic:
        """Return it with its dimensions in another order."""
        return self._per_dimension(lambda values: tuple(values[dim] for dim in order))

    def view(self, shape: Sequence[int]) -> Mosaic:
        """Return the elements in row-major order with another shape of as many elements."""
        to = tuple(shape)
        pieces = []
        for piece in self.pieces:
            boxes: list[tuple[list[int], list[int], int, list[int]]] = [([], [], piece.start, [])]
            for old, new in _groups(self.shape, to):
                boxes = [
                    (at + list(more_at), sizes + list(more_sizes), start + moved, strides + list(more_strides))
                    for at, sizes, start, strides in boxes
                    for more_at, more_sizes, moved, more_strides in _reshape(piece, self.shape, old, to, new)
                ]
            pieces += [
                MosaicPiece(tuple(at), tuple(sizes), piece.source, start, tuple(strides))
                for at, sizes, start, strides in boxes
            ]
        return Mosaic(to, tuple(pieces))

    def _per_dimension(self, change: Change) -> Mosaic:
        pieces = tuple(
            replace(piece, at=change(piece.at), sizes=change(piece.sizes), strides=change(piece.strides))
            for piece in self.pieces
        )
        return Mosaic(change(self.shape), pieces)


def cat(mosaics: Sequence[Mosaic], dim: int) -> Mosaic:
    """Return the tensors one after the other along a dimension."""
    pieces: list[MosaicPiece] = []
    place = 0
    for mosaic in mosaics:
        pieces += [replace(piece, at=_put(piece.at, dim, piece.at[dim] + place)) for piece in mosaic.pieces]
        place += mosaic.shape[dim]
    return Mosaic(_put(mosaics[0].shape, dim, place), tuple(pieces))


@dataclass(frozen=True, slots=True)
class BoxPart:
    """A box of a mosaic whose values are in a box of a source: what a rank that holds the latter can write."""

    at: tuple[int, ...]  # offsets in the mosaic
    sizes: tuple[int, ...]
    first: tuple[int, ...]  # index in the box of the source of the part's first element
    steps: tuple[tuple[int, int], ...]  # per dimension of the mosaic: the source's dimension, and indices per step


def parts_of_box(mosaic: Mosaic, source: str, shape: Sequence[int], box: Box) -> Iterator[BoxPart]:
    """Yield the parts of a mosaic whose values lie in that box (offsets, sizes) of a source of that shape.

    Parts of disjoint boxes are disjoint, and the parts of boxes that cover all sources cover the mosaic.
    """
    sizes = tuple(shape)
    for piece in mosaic.pieces:
        if piece.source == source and 0 not in piece.sizes:
            yield from _inside(piece, sizes, row_major(sizes), box)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor, in elements."""
    strides = list(itertools.accumulate(reversed(shape[1:]), lambda stride, size: stride * size, initial=1))
    return tuple(reversed(strides)) if shape else ()


def _put(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _groups(shape: Sequence[int], to: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the smallest groups of dimensions with equally many elements in both shapes. Neither shape has a 0."""
    old = new = 0
    while old < len(shape) or new < len(to):
        first_old, first_new = old, new
        elements = others = 1
        if old < len(shape):
            elements, old = shape[old], old + 1
        if new < len(to):
            others, new = to[new], new + 1
        while elements != others:
            if elements < others:
                elements, old = elements * shape[old], old + 1
            else:
                others, new = others * to[new], new + 1
        yield range(first_old, old), range(first_new, new)


def _reshape(
    piece: MosaicPiece, shape: Sequence[int], old: range, to: Sequence[int], new: range
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]]:
    """Yield the boxes (offsets, sizes, elements from the start, strides) of one group of dimensions of a piece."""
    if len(old) == len(new) == 1:
        yield (piece.at[old[0]],), (piece.sizes[old[0]],), 0, (piece.strides[old[0]],)
        return
    # The longest run of elements that follow each other with one stride. It takes in dimensions from the last one.
    length, stride, first, inside, outer = 1, 0, 0, 1, len(old)
    for dim in reversed(old):
        size = piece.sizes[dim]
        if size > 1:
            if length != inside or (length > 1 and piece.strides[dim] != stride * length):
                break
            stride = stride if length > 1 else piece.strides[dim]
            length *= size
        first += piece.at[dim] * inside
        inside *= shape[dim]
        outer -= 1
    dims = tuple(to[dim] for dim in new)
    walked = [old[number] for number in range(outer)]
    apart = [math.prod(shape[dim + 1 : old.stop]) for dim in walked]
    for index in itertools.product(*(range(piece.sizes[dim]) for dim in walked)):
        run = first + sum((piece.at[dim] + i) * each for dim, i, each in zip(walked, index, apart, strict=True))
        moved = sum(piece.strides[dim] * i for dim, i in zip(walked, index, strict=True))
        for at, sizes, after in _boxes_of_run(run, length, dims):
            yield at, sizes, moved + after * stride, tuple(stride * each for each in row_major(dims))


def _boxes_of_run(
    first: int, length: int, dims: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield the boxes (offsets, sizes, elements since the run's begin) that elements [first, first + length) fill."""
    if len(dims) < 2:
        yield (first,) * len(dims), (length,) * len(dims), 0
        return
    inner = math.prod(dims[1:])
    done = 0
    while done < length:
        row, column = divmod(first + done, inner)
        rows = (length - done) // inner
        if column == 0 and rows:
            yield (row, *(0,) * (len(dims) - 1)), (rows, *dims[1:]), done
            done += rows * inner
            continue
        here = min(inner - column, length - done)
        for at, sizes, after in _boxes_of_run(column, here, dims[1:]):
            yield (row, *at), (1, *sizes), done + after
        done += here


def _inside(piece: MosaicPiece, shape: tuple[int, ...], strides: tuple[int, ...], box: Box) -> Iterator[BoxPart]:
    """Yield the parts of a piece that lie in a box of its source."""
    place = tuple(piece.start // stride % size for stride, size in zip(strides, shape, strict=True))
    along: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # source's dimension: (step, piece's dimension)
    steps = [(0, 0)] * len(piece.sizes)
    for dim, (size, stride) in enumerate(zip(piece.sizes, piece.strides, strict=True)):
        if size > 1:
            of_source = next(d for d, each in enumerate(strides) if each <= stride and shape[d] > 1)
            if stride % strides[of_source]:  # a diagonal
                yield from _halved(piece, dim, 1, shape, strides, box)
                return
            steps[dim] = (of_source, stride // strides[of_source])
            along[of_source].append((steps[dim][1], dim))
    for of_source, several in along.items():
        several.sort(reverse=True)
        step, dim = several[0]
        if place[of_source] + sum(step * (piece.sizes[d] - 1) for step, d in several) >= shape[of_source]:
            # The indices run on into the next index of the dimension before.
            fit = -(-(shape[of_source] - place[of_source]) // step) if len(several) == 1 else 1
            yield from _halved(piece, dim, fit, shape, strides, box)
            return
    at, sizes, first = list(piece.at), list(piece.sizes), list(place)
    for of_source, (offset, held) in enumerate(zip(*box, strict=True)):
        several = along.get(of_source, [])
        last = place[of_source] + sum(step * (piece.sizes[dim] - 1) for step, dim in several)
        if last < offset or place[of_source] >= offset + held:
            return
        if place[of_source] < offset or last >= offset + held:
            step, dim = several[0]
            if len(several) > 1:
                yield from _halved(piece, dim, 1, shape, strides, box)
                return
            low = max(0, -(-(offset - place[of_source]) // step))
            high = min(piece.sizes[dim], -(-(offset + held - place[of_source]) // step))
            if low >= high:
                return
            at[dim] += low
            sizes[dim] = high - low
            first[of_source] += low * step
        first[of_source] -= offset
    yield BoxPart(tuple(at), tuple(sizes), tuple(first), tuple(steps))


def _halved(
    piece: MosaicPiece, dim: int, count: int, shape: tuple[int, ...], strides: tuple[int, ...], box: Box
) -> Iterator[BoxPart]:
    """Yield the parts of the first `count` indices of a dimension, then those of the next ones, and so on."""
    for low in range(0, piece.sizes[dim], count) if count == 1 else (0, count):
        high = low + count if count == 1 or low == 0 else piece.sizes[dim]
        cut = MosaicPiece(
            _put(piece.at, dim, piece.at[dim] + low),
            _put(piece.sizes, dim, high - low),
            piece.source,
            piece.start + low * piece.strides[dim],
            piece.strides,
        )
        yield from _inside(cut, shape, strides, box)
