"""Records the step of a world as scalar expressions for one row.

`Tracer` is a dispatch mode. It runs each operation of PyTorch as it is, and keeps an array of expressions
(`kernels/scalars.py`) beside each tensor, one for each cell of a row. In that array the row dimension has size 1. A view of a
tensor is a NumPy view of its array, so that writing in place works. An operation that is not in the table, or that mixes
rows (a mean over rows, a slice of them), raises `CannotFuse`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.kernels.compiler import CannotFuse
from shoal.kernels.scalars import TYPES, Graph, Node

ROWS = 1009  # of the traced world: a prime number that no other size is a multiple of

Cells = np.ndarray[Any, Any]  # of nodes


class Traced(NamedTuple):
    """A tensor, and the expressions of its cells in one row."""

    real: Tensor
    cells: Cells


def one_row(shape: Iterable[int]) -> tuple[int, ...]:
    """The shape with its rows reduced to a single one."""
    return tuple(d // ROWS if d % ROWS == 0 else d for d in shape)


def has_rows(size: int) -> bool:
    """Whether a dimension of this size is the rows."""
    return size > 0 and size % ROWS == 0


def boxed(x: Any) -> Cells:
    """A node as an array without dimensions; arrays stay as they are."""
    if isinstance(x, np.ndarray):
        return x
    box = np.empty((), object)
    box[()] = x
    return box


class Tracer(TorchDispatchMode):
    """Runs operations unchanged, and keeps the cells of each tensor that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.known = Graph(), dict[int, Traced]()
        self.inputs: list[tuple[str, Tensor]] = []  # where each is found in a call, and its tensor in the trace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports all of dynamo, which takes a second

    def add_input(self, source: str, x: Tensor) -> None:
        """Make `x` an input of the program, found at `source` in each call."""
        cells = np.empty(one_row(x.shape), object)
        for k, at in enumerate(np.ndindex(cells.shape)):
            cells[at] = self.graph.make("load", x.dtype, len(self.inputs), k)
        cells.flags.writeable = False
        self.inputs.append((source, x))
        self.known[id(x)] = Traced(x, cells)

    def constant(self, x: Tensor) -> Cells:
        """The cells of a tensor that is constant: literals."""
        if x.dtype not in TYPES:
            raise CannotFuse(f"there are tensors of {x.dtype} in it")
        one = x
        for i, size in enumerate(x.shape):
            one = one.narrow(i, 0, size // ROWS) if has_rows(size) else one
        if not bool(((x == one) | (x != x)).all()):
            raise CannotFuse("its rows depend on each other: a constant is not the same for all of them")
        cells = np.empty(one.shape, object)
        for at, value in zip(np.ndindex(cells.shape), one.flatten().tolist(), strict=True):
            cells[at] = self.graph.lit(value, x.dtype)
        return cells

    def traced(self, x: Any) -> Any:
        """An argument of an operation with its cells; numbers stay numbers."""
        if isinstance(x, list | tuple):
            return type(x)(map(self.traced, x))
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.known:
            self.known[id(x)] = Traced(x, self.constant(x))
            self.known[id(x)].cells.flags.writeable = False
        return self.known[id(x)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        inplace = name.endswith("_") and not name.startswith("_")
        method = getattr(self, f"op_{name.rstrip('_')}", None) or ALIKE.get(name.rstrip("_"))
        if method is None:
            raise CannotFuse(f"the operation {name} is not known to the compiler")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        call = method if not isinstance(method, tuple) else getattr(self, method[0])
        more = method[1:] if isinstance(method, tuple) else ()
        cells = call(*more, out, *self.traced(args), **{k: self.traced(v) for k, v in kwargs.items()})
        for x, c in zip(
            (out,) if isinstance(out, Tensor) else out, (cells,) if isinstance(out, Tensor) else cells, strict=True
        ):
            if sum(map(has_rows, x.shape)) > 1:
                raise CannotFuse(f"its rows depend on each other, in the operation {name}")
            if inplace and not self.traced(x).cells.flags.writeable:
                raise CannotFuse("it writes to a tensor of its own, or to one that was passed in")
            if inplace:
                self.traced(x).cells[...] = c
            else:
                assert c.shape == one_row(x.shape), (name, c.shape, x.shape)
                self.known[id(x)] = Traced(x, c)
        return out

    # --- used by the operations below ---

    def cells(self, x: Any, dtype: torch.dtype) -> Cells:
        """A tensor's cells, or a number, in this dtype."""
        if isinstance(x, Traced):
            return x.cells if x.real.dtype == dtype else self.each(lambda n: self.graph.cast(n, dtype), x.cells)
        return boxed(self.graph.lit(x, dtype))

    def each(self, f: Callable[..., Node], *cells: Cells) -> Cells:
        return boxed(np.frompyfunc(f, len(cells), 1)(*cells))

    def do(self, op: str, dtype: torch.dtype, *cells: Cells) -> Cells:
        return self.each(lambda *x: self.graph.do(op, dtype, *x), *cells)

    def axis(self, x: Traced, dim: int) -> int:
        """The number of a dimension, which must not be the rows."""
        if x.real.dim() and has_rows(x.real.shape[dim]):
            raise CannotFuse("its rows depend on each other: an operation goes along them")
        return dim % max(x.real.dim(), 1)

    def last(self, x: Traced, dim: Any, cells: Cells) -> Cells:
        """The cells with the dimensions `dim` (none: all) made one, the last."""
        dims = range(x.real.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
        dims = [self.axis(x, d) for d in dims]
        rest = [d for d in range(cells.ndim) if d not in dims]
        return cells.transpose(*rest, *dims).reshape(*(cells.shape[d] for d in rest), -1)

    def choose(self, choices: Sequence[Cells], index: Cells) -> Cells:
        """`choices[index]`, cell by cell."""

        def one(i: Any, *xs: Any) -> Node:
            if i.op == "lit":
                return xs[i.args[0]]
            end = self.graph.do("add", i.dtype, i, self.graph.lit(len(xs), i.dtype))  # negative ones count from the end
            i = self.graph.do("where", i.dtype, self.graph.do("lt", torch.bool, i, self.graph.lit(0, i.dtype)), end, i)
            usual: Node = Counter(xs).most_common(1)[0][0]
            for k in reversed(range(len(xs))):
                if xs[k] is not usual:
                    is_k = self.graph.do("eq", torch.bool, i, self.graph.lit(k, i.dtype))
                    usual = self.graph.do("where", usual.dtype, is_k, xs[k], usual)
            return usual

        places, *tables = np.broadcast_arrays(index, *choices)
        chosen = np.empty(places.shape, object)
        for at in np.ndindex(chosen.shape):
            chosen[at] = one(places[at], *(t[at] for t in tables))
        return chosen

    # --- cell by cell ---

    def same(self, op: str, out: Tensor, *args: Any) -> Cells:
        return self.do(op, out.dtype, *(self.cells(x, out.dtype) for x in args))

    def compare(self, op: str, out: Tensor, a: Traced, b: Any) -> Cells:
        both = torch.result_type(a.real, b.real if isinstance(b, Traced) else b)
        return self.do(op, torch.bool, self.cells(a, both), self.cells(b, both))

    def logic(self, op: str, out: Tensor, a: Traced, b: Any = True) -> Cells:
        return self.do(op, torch.bool, self.cells(a, torch.bool), self.cells(b, torch.bool))

    def op_bitwise_not(self, out: Tensor, x: Traced) -> Cells:
        return self.do("xor", out.dtype, x.cells, self.cells(True if out.dtype == torch.bool else -1, out.dtype))

    def op_add(self, out: Tensor, a: Any, b: Any, alpha: float = 1, op: str = "add") -> Cells:
        return self.do(op, out.dtype, self.cells(a, out.dtype), self.same("mul", out, b, alpha))

    def op_sub(self, out: Tensor, a: Any, b: Any, alpha: float = 1) -> Cells:
        return self.op_add(out, a, b, alpha, "sub")

    def op_rsub(self, out: Tensor, a: Any, b: Any, alpha: float = 1) -> Cells:
        return self.op_add(out, b, a, alpha, "sub")

    def op_reciprocal(self, out: Tensor, x: Any) -> Cells:
        return self.same("div", out, 1, x)

    def op_div(self, out: Tensor, a: Any, b: Any, rounding_mode: str | None = None) -> Cells:
        if rounding_mode is None:
            return self.same("div", out, a, b)
        if out.is_floating_point():
            raise CannotFuse("the operation div with rounding, of floats, is not known to the compiler")
        a, b = self.cells(a, out.dtype), self.cells(b, out.dtype)
        quo = self.do("quo", out.dtype, a, b)
        if rounding_mode == "trunc":
            return quo
        less = self.do("sub", out.dtype, quo, self.cells(1, out.dtype))
        return self.do("where", out.dtype, self._wraps(out.dtype, a, b), less, quo)

    def op_floor_divide(self, out: Tensor, a: Any, b: Any) -> Cells:
        return self.op_div(out, a, b, "floor")

    def op_remainder(self, out: Tensor, a: Any, b: Any) -> Cells:
        if out.is_floating_point():
            raise CannotFuse("the operation remainder, of floats, is not known to the compiler")
        a, b = self.cells(a, out.dtype), self.cells(b, out.dtype)
        mod = self.do("mod", out.dtype, a, b)
        return self.do("where", out.dtype, self._wraps(out.dtype, a, b), self.do("add", out.dtype, mod, b), mod)

    def _wraps(self, dtype: torch.dtype, a: Cells, b: Cells) -> Cells:
        """Where truncation and floor differ: there is a remainder, and its sign is not the divisor's."""
        zero, mod, bit = self.cells(0, dtype), self.do("mod", dtype, a, b), torch.bool
        signs = self.do("xor", bit, self.do("lt", bit, mod, zero), self.do("lt", bit, b, zero))
        return self.do("and", bit, signs, self.do("ne", bit, mod, zero))

    def op_pow(self, out: Tensor, x: Any, power: Any) -> Cells:
        if not isinstance(power, int | float) or power not in (1, 2, 3, 4, 0.5):
            raise CannotFuse(f"the operation pow, to the power of {power}, is not known to the compiler")
        cells = self.cells(x, out.dtype)
        return self.do("sqrt", out.dtype, cells) if power == 0.5 else self._multiply(out.dtype, [cells] * int(power))

    def _multiply(self, dtype: torch.dtype, parts: list[Cells]) -> Cells:
        return reduce(lambda a, b: self.do("mul", dtype, a, b), parts)

    def op_clamp(self, out: Tensor, x: Any, min: Any = None, max: Any = None) -> Cells:
        cells = self.cells(x, out.dtype)
        cells = cells if min is None else self.do("max", out.dtype, cells, self.cells(min, out.dtype))
        return cells if max is None else self.do("min", out.dtype, cells, self.cells(max, out.dtype))

    def op_clamp_max(self, out: Tensor, x: Any, max: Any) -> Cells:
        return self.op_clamp(out, x, None, max)

    def op_logaddexp(self, out: Tensor, a: Any, b: Any) -> Cells:
        low, high = self.same("min", out, a, b), self.same("max", out, a, b)
        equal = self.do("eq", torch.bool, low, high)  # of two infinities the difference is none
        apart = self.do("where", out.dtype, equal, self.cells(0.0, out.dtype), self.do("sub", out.dtype, low, high))
        return self.do("add", out.dtype, high, self.do("log1p", out.dtype, self.do("exp", out.dtype, apart)))

    def op_where(self, out: Tensor, condition: Traced, a: Any, b: Any) -> Cells:
        return self.do(
            "where", out.dtype, self.cells(condition, torch.bool), self.cells(a, out.dtype), self.cells(b, out.dtype)
        )

    def op_masked_fill(self, out: Tensor, x: Traced, mask: Traced, value: Any) -> Cells:
        return self.op_where(out, mask, value, x)

    # --- new tensors, copies, views ---

    def op_full(self, out: Tensor, *args: Any, **kwargs: Any) -> Cells:
        return self.constant(out)

    def op_clone(self, out: Tensor, x: Traced, **kwargs: Any) -> Cells:
        return np.array(self.cells(x, out.dtype))

    def op_copy(self, out: Tensor, x: Traced, y: Any, *args: Any) -> Cells:
        return self.cells(y, out.dtype)

    def op_view(self, out: Tensor, x: Traced, *args: Any) -> Cells:
        return x.cells.reshape(one_row(out.shape))

    def op_expand(self, out: Tensor, x: Traced, *args: Any, **kwargs: Any) -> Cells:
        return np.broadcast_to(x.cells, one_row(out.shape))

    def op_permute(self, out: Tensor, x: Traced, dims: list[int]) -> Cells:
        return x.cells.transpose(dims)

    def op_transpose(self, out: Tensor, x: Traced, a: int = 0, b: int = 1) -> Cells:
        return x.cells.swapaxes(a, b)

    def op_select(self, out: Tensor, x: Traced, dim: int, index: int) -> Cells:
        return x.cells[(slice(None),) * self.axis(x, dim) + (index, ...)]

    def op_slice(self, out: Tensor, x: Traced, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Cells:
        if out.shape == x.real.shape:
            return x.cells[...]
        return x.cells[(slice(None),) * self.axis(x, dim) + (slice(start, end, step),)]

    def op_split(self, out: list[Tensor], x: Traced, size: Any, dim: int = 0) -> list[Cells]:
        axis = self.axis(x, dim)
        return np.split(x.cells, np.cumsum([y.shape[axis] for y in out])[:-1], axis)

    def op_unbind(self, out: list[Tensor], x: Traced, dim: int = 0) -> list[Cells]:
        axis = self.axis(x, dim)
        return [self.op_select(y, x, axis, i) for i, y in enumerate(out)]

    def op_flip(self, out: Tensor, x: Traced, dims: list[int]) -> Cells:
        return np.flip(x.cells, tuple(self.axis(x, d) for d in dims)).copy()

    def op_cat(self, out: Tensor, parts: list[Traced], dim: int = 0) -> Cells:
        return np.concatenate([self.cells(x, out.dtype) for x in parts], self.axis(parts[0], dim))

    def op_stack(self, out: Tensor, parts: list[Traced], dim: int = 0) -> Cells:
        return np.stack([self.cells(x, out.dtype) for x in parts], dim)

    def op_constant_pad_nd(self, out: Tensor, x: Traced, pad: list[int], value: float = 0) -> Cells:
        cells = np.array(np.broadcast_to(self.cells(value, out.dtype), one_row(out.shape)))
        before = [0] * (x.real.dim() - len(pad) // 2) + pad[-2::-2]  # `pad` begins with the last dimension
        cells[tuple(slice(b, b + n) for b, n in zip(before, x.cells.shape, strict=True))] = x.cells
        return cells

    # --- along a dimension ---

    def fold(self, op: str, out: Tensor, x: Traced, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Cells:
        parts = self.last(x, dim, self.cells(x, out.dtype))
        if not parts.shape[-1]:
            return self.constant(out)
        folded = reduce(lambda a, b: self.do(op, out.dtype, a, b), np.moveaxis(parts, -1, 0))
        return boxed(folded).reshape(one_row(out.shape))

    def op_mean(self, out: Tensor, x: Traced, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Cells:
        return self.do("div", out.dtype, self.fold("add", out, x, dim), self.cells(x.real.numel() // out.numel(), out.dtype))

    def op_cumsum(self, out: Tensor, x: Traced, dim: int, **kwargs: Any) -> Cells:
        cells, axis = np.array(self.cells(x, out.dtype)), self.axis(x, dim)
        along = np.moveaxis(cells, axis, 0)
        for a, b in pairwise(range(len(along))):
            along[b] = self.do("add", out.dtype, along[a], along[b])
        return cells

    def extreme(self, op: str, out: Tensor, x: Traced, dim: Any = None, keepdim: bool = False) -> Cells:
        """argmin and argmax: the first of equals."""
        parts, dtype = np.moveaxis(self.last(x, dim, x.cells), -1, 0), x.real.dtype
        best, at = parts[0], self.cells(0, torch.int64)
        for k in range(1, len(parts)):
            better = self.do(op, torch.bool, parts[k], best)
            best = self.do("where", dtype, better, parts[k], best)
            at = self.do("where", torch.int64, better, self.cells(k, torch.int64), at)
        return np.broadcast_to(at, boxed(best).shape).reshape(one_row(out.shape))

    def op_sort(self, out: Any, x: Traced, *args: Any, **kwargs: Any) -> tuple[Cells, Cells]:
        """Stable, by rank: how many go before."""
        flags = [a for a in args if isinstance(a, bool)]
        dim = next((a for a in args if not isinstance(a, bool)), kwargs.get("dim", -1))
        down = kwargs.get("descending", flags[-1] if flags else False)
        parts, n = np.moveaxis(x.cells, self.axis(x, dim), 0), x.real.shape[dim]
        rank = [self.cells(0, torch.int64)] * n
        for a in range(n):
            for b in range(a + 1, n):
                swap = self.do("gt" if not down else "lt", torch.bool, parts[a], parts[b])  # b goes before a
                rank[a] = self.do("add", torch.int64, rank[a], self.do("cast", torch.int64, swap))
                stay = self.do("xor", torch.bool, swap, self.cells(True, torch.bool))
                rank[b] = self.do("add", torch.int64, rank[b], self.do("cast", torch.int64, stay))
        order = []
        for place in range(n):
            found = self.cells(n - 1, torch.int64)
            for k in reversed(range(n - 1)):
                here = self.do("eq", torch.bool, rank[k], self.cells(place, torch.int64))
                found = self.do("where", torch.int64, here, self.cells(k, torch.int64), found)
            order.append(np.broadcast_to(found, parts.shape[1:]))
        values = [self.choose(list(parts), k) for k in order]
        return np.stack(values, self.axis(x, dim)), np.stack(order, self.axis(x, dim))

    # --- by index ---

    def op_gather(self, out: Tensor, x: Traced, dim: int, index: Traced) -> Cells:
        axis = self.axis(x, dim)
        table = np.moveaxis(x.cells, axis, 0)
        table = table[(slice(None), *(slice(n) for k, n in enumerate(index.cells.shape) if k != axis))]
        return np.moveaxis(self.choose(list(table[:, None]), np.moveaxis(index.cells, axis, 0)), 0, axis)

    def op_index_select(self, out: Tensor, x: Traced, dim: int, index: Traced) -> Cells:
        return self.op_index(out, x, [None] * self.axis(x, dim) + [index])

    def op_index(self, out: Tensor, x: Traced, indices: list[Traced | None]) -> Cells:
        given = [(self.axis(x, d), i.cells) for d, i in enumerate(indices) if i is not None]
        if any(i is not None and i.real.dtype == torch.bool for i in indices):
            raise CannotFuse("the operation index, by a mask, is not known to the compiler")
        dims = [d for d, _ in given]
        lead = np.broadcast_shapes(*(i.shape for _, i in given))
        table = np.moveaxis(x.cells, dims, range(len(dims)))
        rest = table.ndim - len(dims)
        places = [np.broadcast_to(i, lead).reshape(*lead, *[1] * rest) for _, i in given]

        def pick(table: Cells, places: list[Cells]) -> Cells:
            if not places:
                return table
            return self.choose([pick(t, places[1:]) for t in table], places[0])

        picked = pick(table, places)
        together = dims == list(range(dims[0], dims[0] + len(dims)))
        at = dims[0] if together else 0
        return np.moveaxis(picked, range(len(lead)), range(at, at + len(lead))).reshape(one_row(out.shape))

    def op_bmm(self, out: Tensor, a: Traced, b: Traced) -> Cells:
        """Matrix products; what is multiplied with a literal zero is left out."""
        left, right = a.cells, np.swapaxes(b.cells, -1, -2)
        cells = np.empty(one_row(out.shape), object)
        for at in np.ndindex(cells.shape):
            pairs = zip(left[at[:-1]], right[(*at[:-2], at[-1])], strict=True)
            some = [(p, q) for p, q in pairs if not any(x.op == "lit" and x.args[0] == 0 for x in (p, q))]
            terms = [self.graph.do("mul", out.dtype, p, q) for p, q in some]
            zero = self.graph.lit(0, out.dtype)
            cells[at] = reduce(lambda p, q: self.graph.do("add", out.dtype, p, q), terms) if terms else zero
        return cells


ALIKE: dict[str, tuple[str, ...]] = {  # operations that share a method: its name, and its first arguments
    **{op: ("same", op) for op in ("mul", "neg", "abs", "sqrt", "exp", "log", "log1p", "sin", "cos", "atan2", "floor", "ceil")},
    **{op: ("compare", op) for op in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"bitwise_{op}": ("same", op) for op in ("and", "or", "xor")},
    **{f"logical_{op}": ("logic", op) for op in ("and", "or", "xor")},
    **{"logical_not": ("logic", "xor"), "minimum": ("same", "min"), "maximum": ("same", "max"), "clamp_min": ("op_clamp",)},
    **{op: ("fold", f) for op, f in (("sum", "add"), ("prod", "mul"), ("amin", "min"), ("amax", "max"))},
    **{"any": ("fold", "or"), "all": ("fold", "and"), "argmin": ("extreme", "lt"), "argmax": ("extreme", "gt")},
    **{f"{op}{like}": ("op_full",) for op in ("zeros", "ones", "full") for like in ("", "_like")},
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "scalar_tensor", "arange", "eye"), ("op_full",)),
    **dict.fromkeys(("_unsafe_view", "unsqueeze", "squeeze", "alias", "detach", "lift_fresh"), ("op_view",)),
    **{"t": ("op_transpose",), "_to_copy": ("op_clone",), "fill": ("op_copy",), "mm": ("op_bmm",)},
    "split_with_sizes": ("op_split",),
}
