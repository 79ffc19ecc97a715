"""Gymnasium's spaces as Shoal's, and back: what adapters of ordinary Python environments share. Only numpy in here.

`Observer` writes an observation into arrays of fixed shape:

    Box                    one vector, whatever its shape, unless it is an image
    Discrete               one-hot; MultiDiscrete: one-hots end to end; MultiBinary: zeros and ones
    image                  [C, H, W]; uint8 stays uint8, other numbers become float32
    Dict, Tuple            all vectors end to end, in the order of the space, as the part `vector`; each image a part of its
                           own, named as its key is (nested keys are joined with "/", a Tuple's are its places); without
                           images a plain vector

A Box is an image where it has three dimensions, or two and is uint8, and its height and width are at least 5: smaller ones
are boards and tables, and flattened. Two equal sides that are neighbours are height and width, whatever is left the
channels; else the channels are the shorter of first and last; the last where it could be either.

`Moves` reads an action of Shoal's into what the environment wants. Dict and Tuple of choices are one MultiDiscrete, of
boxes one Box; choices beside numbers have no counterpart. A number without bounds is taken as one in [-1, 1], with one bound as
two wide from there, and `note` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np

from shoal.spec import Box, Discrete, MultiDiscrete, Shape, Space, UserError

LEAST = 5  # pixels that an image is high and wide
ENDLESS = 1e30  # a bound beyond this is none: some say the largest float32 for infinity
SIMPLE = ("Discrete", "MultiDiscrete", "MultiBinary", "Box")
VECTOR = "vector"

Put = Callable[[Any, np.ndarray], None]  # (what was seen, the array it goes to)


# --- observations ----------------------------------------------------------------------------------------------------


class Observer:
    """How observations of a space are written."""

    shape: Shape | dict[str, Shape]
    images: Any  # dtype of the images: uint8 unless there are some of other numbers
    plain: bool  # an observation is one vector, and is copied

    def __init__(self, space: Any, leave_out: str | None = None):
        """`leave_out`: a key of a Dict that is not for the agent to see."""
        self._numbers: list[tuple[tuple[Any, ...], slice, Put]] = []
        self._pixels: list[tuple[tuple[Any, ...], str, Put]] = []
        width, shapes, types = 0, {}, set()
        for path, leaf in _leaves(space, "observation"):
            if leave_out is not None and path[:1] == (leave_out,):
                continue
            if _is_image(leaf):
                name = "/".join(map(str, path)).replace(".", "_") or "image"  # a net's parts may not have a dot in their names
                name = f"{name}/image" if name == VECTOR else name
                last = _channels_last(leaf.shape)
                shapes[name] = _pixels_shape(leaf.shape, last)
                types.add(np.dtype(leaf.dtype))
                self._pixels.append((path, name, _put_image(leaf, last)))
            else:
                n, put = _numbers(leaf)
                self._numbers.append((path, slice(width, width + n), put))
                width += n
        self.images = np.uint8 if types <= {np.dtype(np.uint8)} else np.float32
        self.plain = kind_of(space) == "Box" and not shapes and len(space.shape) == 1
        if not shapes:
            self.shape = (width,)
        elif len(shapes) == 1 and not width:
            (self.shape,) = shapes.values()
        else:
            self.shape = {**({VECTOR: (width,)} if width else {}), **shapes}

    def write(self, obs: Any, out: Any, first: bool = False) -> None:
        """`out` is an array of `shape`, or where that has parts a dict of them. `first`: an episode begins, for observers
        that remember (`pixels.py`)."""
        if self.plain:
            if np.shape(obs) != out.shape:  # it would be repeated, or cut
                raise UserError(f"an observation is of shape {np.shape(obs)}, and its space of {out.shape}.")
            out[...] = obs
            return
        parts = isinstance(out, dict)
        for path, at, put in self._numbers:
            put(_follow(obs, path), out[VECTOR][at] if parts else out[at])
        for path, name, put in self._pixels:
            put(_follow(obs, path), out[name] if parts else out)


def kind_of(space: Any) -> str:
    """Which of gymnasium's spaces it is: by name, for there is an older library with the same ones."""
    names = [c.__name__ for c in type(space).__mro__]
    return next((n for n in names if n in (*SIMPLE, "Dict", "Tuple")), names[0])


def _leaves(space: Any, what: str, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The simple spaces that a space is made of, each with the keys that lead to it."""
    kind = kind_of(space)
    if kind in SIMPLE:
        yield path, space
    elif kind in ("Dict", "Tuple"):
        for key, inner in space.spaces.items() if kind == "Dict" else enumerate(space.spaces):
            yield from _leaves(inner, what, (*path, key))
    else:
        raise UserError(
            f"this environment has {what}s that are a {kind} space: Shoal takes {', '.join(SIMPLE)}, Dict and Tuple."
        )


def _follow(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _numbers(space: Any) -> tuple[int, Put]:
    """How many numbers a simple space becomes, and how they are written."""
    if kind_of(space) in ("Box", "MultiBinary"):
        return prod(space.shape), lambda x, out: np.copyto(out, np.ravel(x), casting="unsafe")
    sizes, starts = _choices(space)
    first = np.cumsum([0, *sizes[:-1]]) - np.array(starts)

    def one_hot(x: Any, out: np.ndarray) -> None:
        out.fill(0)
        out[first + np.ravel(x)] = 1

    return sum(sizes), one_hot


def _choices(space: Any) -> tuple[list[int], list[int]]:
    """The sizes of a space's choices, and what each counts from."""
    kind = kind_of(space)
    if kind == "Discrete":
        return [int(space.n)], [int(getattr(space, "start", 0))]
    if kind == "MultiBinary":
        return [2] * prod(space.shape), [0] * prod(space.shape)
    sizes = [int(n) for n in np.ravel(space.nvec)]
    return sizes, [int(n) for n in np.ravel(getattr(space, "start", np.zeros(len(sizes), int)))]


def _is_image(space: Any) -> bool:
    if kind_of(space) != "Box":
        return False
    shape = space.shape
    if len(shape) == 3:
        return min(_pixels_shape(shape, _channels_last(shape))[1:]) >= LEAST
    return len(shape) == 2 and np.dtype(space.dtype) == np.uint8 and min(shape) >= LEAST


def _channels_last(shape: Shape) -> bool:
    if len(shape) == 2:
        return False
    first, middle, last = shape
    if first == middle or middle == last:
        return first == middle
    return last <= first


def _pixels_shape(shape: Shape, last: bool) -> Shape:
    if len(shape) == 2:
        return (1, *shape)
    return (shape[2], shape[0], shape[1]) if last else tuple(shape)


def _put_image(space: Any, last: bool) -> Put:
    whole = np.dtype(space.dtype) == np.uint8

    def put(x: Any, out: np.ndarray) -> None:
        x = np.moveaxis(x, -1, 0) if last else x
        out[...] = np.asarray(x) / 255 if whole and out.dtype != np.uint8 else x  # beside one of floats, in [0, 1] as they are

    return put


# --- actions ---------------------------------------------------------------------------------------------------------


class Moves:
    """How actions for a space are read."""

    space: Space
    note: str | None = None

    def __init__(self, space: Any):
        leaves = list(_leaves(space, "action"))
        kinds = {kind_of(leaf) == "Box" for _, leaf in leaves}
        if len(kinds) != 1:
            raise UserError(
                "this environment's actions are choices and numbers at once: Shoal takes the one or the other."
                if kinds
                else "this environment has an empty action space: there is nothing to learn."
            )
        if kinds == {True}:
            low, high = (
                np.concatenate([np.ravel(getattr(x, side)) for _, x in leaves]).astype(float) for side in ("low", "high")
            )
            no_low, no_high = ~(low > -ENDLESS), ~(high < ENDLESS)
            if (no_low | no_high).any():
                count = int((no_low | no_high).sum())
                self.note = f"{count} of {len(low)} action dimensions have no bounds of their own and are taken as [-1, 1]."
            low = np.where(no_low, np.where(no_high, -1.0, high - 2), low)
            self.space = Box(tuple(low.tolist()), tuple(np.where(no_high, np.where(no_low, 1.0, low + 2), high).tolist()))
        else:
            sizes = [n for _, leaf in leaves for n in _choices(leaf)[0]]
            alone = kind_of(space) == "Discrete"
            self.space = Discrete(sizes[0]) if alone else MultiDiscrete(tuple(sizes))
        self._start = int(getattr(space, "start", 0)) if kind_of(space) == "Discrete" else None
        self._read = _reader(space)

    def read(self, action: np.ndarray) -> Any:
        """An action [], [D] of whole numbers or [D] of float32, as the environment wants it; a choice as the numpy number that
        spaces of Gymnasium's draw, and know faster than Python's."""
        if self._start is not None:
            return action[()] + self._start if self._start else action[()]
        return self._read(action, 0)[0]


def _reader(space: Any) -> Callable[[np.ndarray, int], tuple[Any, int]]:
    """(all numbers, where to begin) -> what the space wants, and where the next one begins."""
    kind = kind_of(space)
    if kind in ("Dict", "Tuple"):
        named = kind == "Dict"
        inner = [(k, _reader(x)) for k, x in (space.spaces.items() if named else enumerate(space.spaces))]

        def several(x: np.ndarray, at: int) -> tuple[Any, int]:
            out = {}
            for key, read in inner:
                out[key], at = read(x, at)
            return (out if named else tuple(out.values())), at

        return several
    if kind == "Discrete":
        start = int(getattr(space, "start", 0))
        return lambda x, at: (int(x[at]) + start, at + 1)
    shape, dtype = tuple(space.shape), space.dtype
    n = prod(shape)
    if kind == "Box":
        round_off = np.rint if np.issubdtype(dtype, np.integer) else np.asarray

        def box(x: np.ndarray, at: int) -> tuple[Any, int]:
            whole = round_off(x[at : at + n]).astype(dtype).reshape(shape)
            return np.clip(whole, space.low, space.high), at + n  # float32 of a bound in float64 may lie beyond it

        return box
    starts = np.reshape(_choices(space)[1], shape)
    return lambda x, at: ((x[at : at + n].reshape(shape) + starts).astype(dtype), at + n)


def allow(mask: Any, space: Space, legal: np.ndarray) -> None:
    """Write a mask of an environment's, an array or for several choices one each, into `legal` [A]. Where it forbids
    everything, as for those who wait, it is taken to forbid nothing; so is none."""
    if mask is None:
        legal.fill(True)
        return
    flat = np.concatenate([np.ravel(m) for m in mask]) if isinstance(mask, tuple | list) else np.ravel(mask)
    if flat.shape != legal.shape:
        raise UserError(f"an action_mask has {flat.size} entries, and the agent {legal.size} choices.")
    legal[...] = flat != 0
    at = 0
    for n in space.sizes:  # type: ignore[union-attr]
        if not legal[at : at + n].any():
            legal[at : at + n] = True
        at += n
