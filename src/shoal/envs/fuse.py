"""One kernel a step: a small compiler for native worlds, whose steps are some sixty tiny operations on [B, few, few].

`fuse(world)` runs `world._transition` once, on a clone with a tell-tale number of rows, under a dispatch mode that keeps
beside each tensor an array of scalar expressions, one for each cell of a row: the row axis has size 1 there, views are
NumPy views, and equal expressions are one node. What comes out is straight-line code for one row, written as C and
compiled by `cc` for the CPU, in a loop over rows, or by NVRTC, which PyTorch brings, for CUDA, a row a thread. Each kernel
is then run on the clone's rows, against what the operations themselves gave there; what disagrees is not used.

Baked in, as literals: the config and every tensor the world holds, rows alike, save those of no dimension: these, such as
the `stage` of a curriculum, are read at each call. So a world may change its 0-dimensional tensors, in place or by
assignment, and must not change others after `fuse`. An operation that is not in the table, or that lets rows look at each
other (a mean over rows, a slice of them), makes `fuse` return a sentence that says so, and the world stays as it was.

What a fused step returns is the same tree. State tensors are written anew at each call, or are those passed in where
nothing changed them; other leaves may be shared: one tensor where expressions are equal, and one for good where a leaf
is constant. Arithmetic is IEEE's, in the order written: no contraction, no fast math; sums run left to right, products
with literal zeros of a matrix are left out. An index out of range is not noticed: it picks one of the choices. The CPU's
kernels are kept in $XDG_CACHE_HOME/shoal/kernels (or ~/.cache), named by what they were made from.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.envs.base import Phase, State, World
from shoal.kernels.compiler import CannotFuse, compiler, library  # noqa: F401
from shoal.spec import Box, Outcome, tree_leaves

ROWS = 1009  # of the clone: a prime that no other size is a multiple of
MOST = {"cpu": 6000, "cuda": 2500}  # statements in a kernel: a few seconds of compiling
BLOCK = 64  # rows of a block on CUDA
FLAGS = ("-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC", "-lm")

Cells = np.ndarray[Any, Any]  # of nodes


# --- scalars: nodes that are made once -------------------------------------------------------------------------------

TYPES = {  # dtype -> C, NumPy
    torch.float32: ("float", np.float32),
    torch.float64: ("double", np.float64),
    torch.int64: ("long long", np.int64),
    torch.int32: ("int", np.int32),
    torch.uint8: ("unsigned char", np.uint8),
    torch.bool: ("bool", np.bool_),
}
SCALARS: dict[str, tuple[str, Any]] = {  # operation -> C, NumPy; {f} is the suffix of C's float functions
    "add": ("{0} + {1}", np.add),
    "sub": ("{0} - {1}", np.subtract),
    "mul": ("{0} * {1}", np.multiply),
    "div": ("{0} / {1}", np.true_divide),
    "quo": ("{1} ? {0} / {1} : 0", lambda a, b: np.trunc(a / b)),  # of integers, towards zero
    "mod": ("{1} ? {0} % {1} : 0", np.fmod),
    "neg": ("-{0}", np.negative),
    "abs": ("fabs{f}({0})", np.abs),
    "sqrt": ("sqrt{f}({0})", np.sqrt),
    "exp": ("exp{f}({0})", np.exp),
    "log": ("log{f}({0})", np.log),
    "log1p": ("log1p{f}({0})", np.log1p),
    "sin": ("sin{f}({0})", np.sin),
    "cos": ("cos{f}({0})", np.cos),
    "atan2": ("atan2{f}({0}, {1})", np.arctan2),
    "floor": ("floor{f}({0})", np.floor),
    "ceil": ("ceil{f}({0})", np.ceil),
    "min": ("{0} < {1} || {0} != {0} ? {0} : {1}", np.minimum),
    "max": ("{0} > {1} || {0} != {0} ? {0} : {1}", np.maximum),
    **{
        name: (f"{{0}} {sign} {{1}}", function)
        for name, sign, function in (
            *(("eq", "==", np.equal), ("ne", "!=", np.not_equal), ("lt", "<", np.less), ("le", "<=", np.less_equal)),
            *(("gt", ">", np.greater), ("ge", ">=", np.greater_equal)),
            *(("and", "&", np.bitwise_and), ("or", "|", np.bitwise_or), ("xor", "^", np.bitwise_xor)),
        )
    },
    "where": ("{0} ? {1} : {2}", np.where),
    "cast": ("({t}){0}", lambda a: a),
}
COMMUTE = {"add", "mul", "eq", "ne", "and", "or", "xor"}


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    op: str  # of SCALARS, or lit (a value), or load (which input, and which cell of its row)
    dtype: torch.dtype
    args: tuple[Any, ...]


class Graph:
    def __init__(self) -> None:
        self.nodes: dict[Any, Node] = {}  # in the order they were made, which is one to compute them in

    def make(self, op: str, dtype: torch.dtype, *args: Any) -> Node:
        key = (op, dtype, *(x.hex() if isinstance(x, float) else x for x in args))  # hex: 0.0 is not -0.0
        return self.nodes.setdefault(key, Node(op, dtype, args))

    def lit(self, value: Any, dtype: torch.dtype) -> Node:
        return self.make("lit", dtype, TYPES[dtype][1](value).tolist())

    def do(self, op: str, dtype: torch.dtype, *args: Node) -> Node:
        """The node, or a simpler one that is bit for bit the same."""
        if all(x.op == "lit" for x in args):
            with np.errstate(all="ignore"):
                return self.lit(SCALARS[op][1](*(TYPES[x.dtype][1](x.args[0]) for x in args)), dtype)
        value = [x.args[0] if x.op == "lit" else None for x in args]
        if op == "where" and (value[0] is not None or args[1] is args[2]):
            return args[1] if value[0] or args[1] is args[2] else args[2]
        for a, b in ((0, 1), (1, 0)):
            if (op == "mul" and value[b] == 1) or (op == "and" and value[b] is True) or (op == "or" and value[b] is False):
                return args[a]
            if (op == "and" and value[b] is False) or (op == "or" and value[b] is True):
                return args[b]
        twin = self.nodes.get((op, dtype, *reversed(args))) if op in COMMUTE else None
        return twin or self.make(op, dtype, *args)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        if x.dtype == dtype:
            return x
        return self.do("ne", dtype, x, self.lit(0, x.dtype)) if dtype == torch.bool else self.do("cast", dtype, x)


# --- tracing: what each operation of torch does to cells --------------------------------------------------------------


class Val(NamedTuple):
    real: Tensor
    cells: Cells


def few(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape with a single row."""
    return tuple(d // ROWS if d % ROWS == 0 else d for d in shape)


def has_rows(size: int) -> bool:
    return size > 0 and size % ROWS == 0


def boxed(x: Any) -> Cells:
    if isinstance(x, np.ndarray):
        return x
    box = np.empty((), object)
    box[()] = x
    return box


class Tracer(TorchDispatchMode):
    """Runs operations as they are, and beside each tensor keeps its cells."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.known = Graph(), dict[int, Val]()
        self.inputs: list[tuple[str, Tensor]] = []  # where each is found at a call, and what it was in the trace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports all of dynamo, which takes a second

    def give(self, source: str, x: Tensor) -> None:
        """`x` is an input."""
        cells = np.empty(few(x.shape), object)
        for k, at in enumerate(np.ndindex(cells.shape)):
            cells[at] = self.graph.make("load", x.dtype, len(self.inputs), k)
        cells.flags.writeable = False
        self.inputs.append((source, x))
        self.known[id(x)] = Val(x, cells)

    def baked(self, x: Tensor) -> Cells:
        """The cells of a constant: literals."""
        if x.dtype not in TYPES:
            raise CannotFuse(f"there are tensors of {x.dtype} in it")
        one = x
        for i, size in enumerate(x.shape):
            one = one.narrow(i, 0, size // ROWS) if has_rows(size) else one
        if not bool(((x == one) | (x != x)).all()):
            raise CannotFuse("its rows look at each other: a constant is not alike for all of them")
        cells = np.empty(one.shape, object)
        for at, value in zip(np.ndindex(cells.shape), one.flatten().tolist(), strict=True):
            cells[at] = self.graph.lit(value, x.dtype)
        return cells

    def look(self, x: Any) -> Any:
        """An argument with its cells; numbers stay numbers."""
        if isinstance(x, list | tuple):
            return type(x)(map(self.look, x))
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.known:
            self.known[id(x)] = Val(x, self.baked(x))
            self.known[id(x)].cells.flags.writeable = False
        return self.known[id(x)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        inplace = name.endswith("_") and not name.startswith("_")
        method = getattr(self, f"op_{name.rstrip('_')}", None) or ALIKE.get(name.rstrip("_"))
        if method is None:
            raise CannotFuse(f"the operation {name} is not known to the compiler")
        out = func(*args, **(kwargs or {}))
        call = method if not isinstance(method, tuple) else getattr(self, method[0])
        more = method[1:] if isinstance(method, tuple) else ()
        cells = call(*more, out, *self.look(args), **self.look_all(kwargs or {}))
        for x, c in zip(
            (out,) if isinstance(out, Tensor) else out, (cells,) if isinstance(out, Tensor) else cells, strict=True
        ):
            if sum(map(has_rows, x.shape)) > 1:
                raise CannotFuse(f"its rows look at each other, in the operation {name}")
            if inplace and not self.look(x).cells.flags.writeable:
                raise CannotFuse("it writes to a tensor of its own, or to one that was passed in")
            if inplace:
                self.look(x).cells[...] = c
            else:
                assert c.shape == few(x.shape), (name, c.shape, x.shape)
                self.known[id(x)] = Val(x, c)
        return out

    def look_all(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {k: self.look(v) for k, v in kwargs.items()}

    # --- tools of the operations ---

    def cells(self, x: Any, dtype: torch.dtype) -> Cells:
        """A tensor's cells, or a number, in this dtype."""
        if isinstance(x, Val):
            return x.cells if x.real.dtype == dtype else self.each(lambda n: self.graph.cast(n, dtype), x.cells)
        return boxed(self.graph.lit(x, dtype))

    def each(self, f: Callable[..., Node], *cells: Cells) -> Cells:
        return boxed(np.frompyfunc(f, len(cells), 1)(*cells))

    def do(self, op: str, dtype: torch.dtype, *cells: Cells) -> Cells:
        return self.each(lambda *x: self.graph.do(op, dtype, *x), *cells)

    def axis(self, x: Val, dim: int) -> int:
        """A dimension that is not the rows'."""
        if x.real.dim() and has_rows(x.real.shape[dim]):
            raise CannotFuse("its rows look at each other: an operation goes along them")
        return dim % max(x.real.dim(), 1)

    def last(self, x: Val, dim: Any, cells: Cells) -> Cells:
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

    def compare(self, op: str, out: Tensor, a: Val, b: Any) -> Cells:
        both = torch.result_type(a.real, b.real if isinstance(b, Val) else b)
        return self.do(op, torch.bool, self.cells(a, both), self.cells(b, both))

    def logic(self, op: str, out: Tensor, a: Val, b: Any = True) -> Cells:
        return self.do(op, torch.bool, self.cells(a, torch.bool), self.cells(b, torch.bool))

    def op_bitwise_not(self, out: Tensor, x: Val) -> Cells:
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

    def op_where(self, out: Tensor, condition: Val, a: Any, b: Any) -> Cells:
        return self.do(
            "where", out.dtype, self.cells(condition, torch.bool), self.cells(a, out.dtype), self.cells(b, out.dtype)
        )

    def op_masked_fill(self, out: Tensor, x: Val, mask: Val, value: Any) -> Cells:
        return self.op_where(out, mask, value, x)

    # --- made, copied, seen in another shape ---

    def op_full(self, out: Tensor, *args: Any, **kwargs: Any) -> Cells:
        return self.baked(out)

    def op_clone(self, out: Tensor, x: Val, **kwargs: Any) -> Cells:
        return np.array(self.cells(x, out.dtype))

    def op_copy(self, out: Tensor, x: Val, y: Any, *args: Any) -> Cells:
        return self.cells(y, out.dtype)

    def op_view(self, out: Tensor, x: Val, *args: Any) -> Cells:
        return x.cells.reshape(few(out.shape))

    def op_expand(self, out: Tensor, x: Val, *args: Any, **kwargs: Any) -> Cells:
        return np.broadcast_to(x.cells, few(out.shape))

    def op_permute(self, out: Tensor, x: Val, dims: list[int]) -> Cells:
        return x.cells.transpose(dims)

    def op_transpose(self, out: Tensor, x: Val, a: int = 0, b: int = 1) -> Cells:
        return x.cells.swapaxes(a, b)

    def op_select(self, out: Tensor, x: Val, dim: int, index: int) -> Cells:
        return x.cells[(slice(None),) * self.axis(x, dim) + (index, ...)]

    def op_slice(self, out: Tensor, x: Val, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Cells:
        if out.shape == x.real.shape:
            return x.cells[...]
        return x.cells[(slice(None),) * self.axis(x, dim) + (slice(start, end, step),)]

    def op_split(self, out: list[Tensor], x: Val, size: Any, dim: int = 0) -> list[Cells]:
        axis = self.axis(x, dim)
        return np.split(x.cells, np.cumsum([y.shape[axis] for y in out])[:-1], axis)

    def op_unbind(self, out: list[Tensor], x: Val, dim: int = 0) -> list[Cells]:
        axis = self.axis(x, dim)
        return [self.op_select(y, x, axis, i) for i, y in enumerate(out)]

    def op_flip(self, out: Tensor, x: Val, dims: list[int]) -> Cells:
        return np.flip(x.cells, tuple(self.axis(x, d) for d in dims)).copy()

    def op_cat(self, out: Tensor, parts: list[Val], dim: int = 0) -> Cells:
        return np.concatenate([self.cells(x, out.dtype) for x in parts], self.axis(parts[0], dim))

    def op_stack(self, out: Tensor, parts: list[Val], dim: int = 0) -> Cells:
        return np.stack([self.cells(x, out.dtype) for x in parts], dim)

    def op_constant_pad_nd(self, out: Tensor, x: Val, pad: list[int], value: float = 0) -> Cells:
        cells = np.array(np.broadcast_to(self.cells(value, out.dtype), few(out.shape)))
        before = [0] * (x.real.dim() - len(pad) // 2) + pad[-2::-2]  # told of the last dimension first
        cells[tuple(slice(b, b + n) for b, n in zip(before, x.cells.shape, strict=True))] = x.cells
        return cells

    # --- along a dimension ---

    def fold(self, op: str, out: Tensor, x: Val, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Cells:
        parts = self.last(x, dim, self.cells(x, out.dtype))
        if not parts.shape[-1]:
            return self.baked(out)
        folded = reduce(lambda a, b: self.do(op, out.dtype, a, b), np.moveaxis(parts, -1, 0))
        return boxed(folded).reshape(few(out.shape))

    def op_mean(self, out: Tensor, x: Val, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Cells:
        return self.do("div", out.dtype, self.fold("add", out, x, dim), self.cells(x.real.numel() // out.numel(), out.dtype))

    def op_cumsum(self, out: Tensor, x: Val, dim: int, **kwargs: Any) -> Cells:
        cells, axis = np.array(self.cells(x, out.dtype)), self.axis(x, dim)
        along = np.moveaxis(cells, axis, 0)
        for a, b in pairwise(range(len(along))):
            along[b] = self.do("add", out.dtype, along[a], along[b])
        return cells

    def extreme(self, op: str, out: Tensor, x: Val, dim: Any = None, keepdim: bool = False) -> Cells:
        """argmin and argmax: the first of equals."""
        parts, dtype = np.moveaxis(self.last(x, dim, x.cells), -1, 0), x.real.dtype
        best, at = parts[0], self.cells(0, torch.int64)
        for k in range(1, len(parts)):
            better = self.do(op, torch.bool, parts[k], best)
            best = self.do("where", dtype, better, parts[k], best)
            at = self.do("where", torch.int64, better, self.cells(k, torch.int64), at)
        return np.broadcast_to(at, boxed(best).shape).reshape(few(out.shape))

    def op_sort(self, out: Any, x: Val, *args: Any, **kwargs: Any) -> tuple[Cells, Cells]:
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

    def op_gather(self, out: Tensor, x: Val, dim: int, index: Val) -> Cells:
        axis = self.axis(x, dim)
        table = np.moveaxis(x.cells, axis, 0)
        table = table[(slice(None), *(slice(n) for k, n in enumerate(index.cells.shape) if k != axis))]
        return np.moveaxis(self.choose(list(table[:, None]), np.moveaxis(index.cells, axis, 0)), 0, axis)

    def op_index_select(self, out: Tensor, x: Val, dim: int, index: Val) -> Cells:
        return self.op_index(out, x, [None] * self.axis(x, dim) + [index])

    def op_index(self, out: Tensor, x: Val, indices: list[Val | None]) -> Cells:
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
        return np.moveaxis(picked, range(len(lead)), range(at, at + len(lead))).reshape(few(out.shape))

    def op_bmm(self, out: Tensor, a: Val, b: Val) -> Cells:
        """Matrix products; what is multiplied with a literal zero is left out."""
        left, right = a.cells, np.swapaxes(b.cells, -1, -2)
        cells = np.empty(few(out.shape), object)
        for at in np.ndindex(cells.shape):
            pairs = zip(left[at[:-1]], right[(*at[:-2], at[-1])], strict=True)
            some = [(p, q) for p, q in pairs if not any(x.op == "lit" and x.args[0] == 0 for x in (p, q))]
            terms = [self.graph.do("mul", out.dtype, p, q) for p, q in some]
            zero = self.graph.lit(0, out.dtype)
            cells[at] = reduce(lambda p, q: self.graph.do("add", out.dtype, p, q), terms) if terms else zero
        return cells


ALIKE: dict[str, tuple[str, ...]] = {  # operations that are another's, or one of a family: the method, and what to tell it
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


# --- the program: what a trace came to, and how it is written ---------------------------------------------------------


class Program:
    """One phase of a world, traced: the inputs, the cells to write, and the tree to return."""

    def __init__(self, world: World, phase: Phase):
        clone, tracer = type(world)(world.config, ROWS, "cpu", world.dtype), Tracer()
        refuse_other(clone, world)
        self.example = state, actions, noise = example(clone)
        for place, part in (("state", state), ("actions", actions)):
            for key, x in part.items():
                tracer.give(f"{place}[{key!r}]", x)
        tracer.give("noise", noise)
        for name, x in vars(clone).items():
            if isinstance(x, Tensor) and x.dim() == 0:
                tracer.give(f"world.{name}", x)
        before = held(clone)
        with tracer:
            result = clone._transition(phase, *self.example)
        if (changed := [k for k, v in held(clone).items() if before.get(k) != v]) or before.keys() - held(clone).keys():
            raise CannotFuse(f"its step changes {changed[0] if changed else 'what it holds'!r}, which is not in its state")
        self.clone, self.result, self.inputs, self.look = clone, result, tracer.inputs, tracer.look
        self.groups: dict[Any, list[tuple[Node, ...]]] = {}  # what is written, by dtype and shape: an allocation each
        self.constants: dict[Any, tuple[str, Tensor]] = {}
        self.shared: dict[Any, str] = {}
        self.names: dict[str, Any] = {}  # what the tree's text speaks of
        self.said: dict[int, str] = {}
        self.passed: set[int] = set()
        new = ", ".join(f"{k!r}: {self.leaf(v, f'state[{k!r}]')}" for k, v in result[0].items())
        self.tree = f"{{{new}}}, {self.text(result[1])}"
        seen: set[Node] = set()
        todo = [n for cells in self.groups.values() for leaf in cells for n in leaf]
        while todo:
            if (node := todo.pop()) not in seen:
                seen.add(node)
                todo += [x for x in node.args if isinstance(x, Node)]
        self.order = [n for n in tracer.graph.nodes.values() if n in seen]
        self.statements = sum(n.op != "lit" for n in self.order)
        self.loaded = sorted({n.args[0] for n in self.order if n.op == "load"})

    def text(self, tree: Any) -> str:
        """The tree as an expression; a part that stands in two places is made once."""
        if tree is None or isinstance(tree, Tensor):
            return "None" if tree is None else self.leaf(tree)
        if isinstance(tree, dict):
            return "{" + ", ".join(f"{k!r}: {self.text(v)}" for k, v in tree.items()) + "}"
        if not is_dataclass(tree):
            raise CannotFuse(f"its outcome holds a {type(tree).__name__}")
        if id(tree) in self.said:
            return self.said[id(tree)]
        self.names[type(tree).__name__] = type(tree)
        name = self.said[id(tree)] = f"part{len(self.said)}"
        return f"({name} := {type(tree).__name__}({', '.join(self.text(getattr(tree, f.name)) for f in fields(tree))}))"

    def leaf(self, x: Tensor, source: str = "") -> str:
        """The name of a leaf. `source`: it is of the state, and its own, for the owner of a state may write to it."""
        if x.dim() == 0 or x.shape[0] != ROWS:
            raise CannotFuse(f"there is a tensor of shape {tuple(x.shape)} in its outcome, with no dimension for the rows")
        cells: tuple[Node, ...] = tuple(self.look(x).cells.flat)
        key = x.dtype, x.shape[1:]
        if not source and all(n.op == "lit" for n in cells):
            return self.constants.setdefault((*key, cells), (f"k{len(self.constants)}", x[:1]))[0]
        i = cells[0].args[0] if cells and cells[0].op == "load" else -1
        if source and i >= 0 and self.inputs[i][0] == source and cells == tuple(self.look(self.inputs[i][1]).cells.flat):
            self.passed.add(i)
            return f"x{i}"
        if source or (*key, cells) not in self.shared:
            group = self.groups.setdefault(key, [])
            group.append(cells)
            name = f"y{list(self.groups).index(key)}_{len(group) - 1}"
            return name if source else self.shared.setdefault((*key, cells), name)
        return self.shared[*key, cells]

    def write(self, device: str) -> str:
        """The kernel's text, for "cpu" or "cuda"."""
        if self.statements > MOST[device]:
            raise CannotFuse(f"its step is too large for one kernel, {self.statements} statements where {MOST[device]} may be")
        name: dict[Node, str] = {}
        body = []
        for node in self.order:
            if node.op == "lit":
                name[node] = literal(node)
                continue
            kind = TYPES[node.dtype][0]
            if node.op == "load":
                i, k = node.args
                shape = self.inputs[i][1].shape
                line = f"x{i}[{f'r * {shape[1:].numel()} + {k}' if shape else 0}]"  # a scalar is the same in all rows
            else:
                suffix = "f" if node.dtype == torch.float32 else ""
                line = SCALARS[node.op][0].format(*(name[x] for x in node.args), f=suffix, t=kind)
            name[node] = f"v{len(name)}"
            body.append(f"const {kind} {name[node]} = {line};")
        for g, leaves in enumerate(self.groups.values()):
            for k, cells in enumerate(leaves):
                for j, node in enumerate(cells):
                    body.append(f"y{g}[rows * {k * len(cells)} + r * {len(cells)} + {j}] = {name[node]};")
        inputs = [f"const {TYPES[self.inputs[i][1].dtype][0]} *__restrict__ x{i}" for i in self.loaded]
        outputs = [f"{TYPES[dtype][0]} *__restrict__ y{g}" for g, (dtype, _) in enumerate(self.groups)]
        return TEXT[device].format(pointers=", ".join(inputs + outputs), lines="\n        ".join(body))

    def bind(self, kernel: Any, world: World) -> Callable[..., tuple[Any, Outcome]]:
        """The function that is called: arguments checked, outputs allocated, the kernel run and the tree built."""
        rows, device = world.rows, world.device

        def fit(x: Tensor, shape: torch.Size, dtype: torch.dtype, name: str) -> Tensor:
            if x.shape != shape:
                raise ValueError(f"{name} has the shape {tuple(x.shape)}, and should have {tuple(shape)}.")
            if x.is_floating_point() and not dtype.is_floating_point:
                raise ValueError(f"{name} is {x.dtype}, and should be {dtype}.")
            return x.to(device, dtype).contiguous()

        space: dict[str, Any] = {**self.names, "fit": fit, "kernel": kernel, "world": world, "empty_like": torch.empty_like}
        space |= {name: x.to(device).repeat(rows, *[1] * (x.dim() - 1)) for name, x in self.constants.values()}
        lines = ["def call(state, actions, noise):"]
        here = "is_cpu" if device.type == "cpu" else f"is_{device.type}"
        for i in sorted({*self.loaded, *self.passed}):
            source, x = self.inputs[i]
            space |= {f"s{i}": torch.Size((rows, *x.shape[1:])) if x.dim() else x.shape, f"d{i}": x.dtype}
            fits = f"x{i}.shape == s{i} and x{i}.dtype is d{i} and x{i}.{here} and x{i}.is_contiguous()"
            lines += [f"x{i} = {source}", f"if not ({fits}): x{i} = fit(x{i}, s{i}, d{i}, {source!r})"]
        for g, ((dtype, shape), leaves) in enumerate(self.groups.items()):
            space[f"t{g}"] = torch.empty(len(leaves), rows, *shape, dtype=dtype, device=device)
            space[f"t{g}"] = space[f"t{g}"] if len(leaves) > 1 else space[f"t{g}"][0]
            parts = ", ".join(f"y{g}_{k}" for k in range(len(leaves)))
            lines += [f"y{g} = empty_like(t{g})", f"{parts} = y{g}" + (".unbind(0)" if len(leaves) > 1 else "")]
        given = [f"x{i}" for i in self.loaded] + [f"y{g}" for g in range(len(self.groups))]
        if device.type == "cpu":
            lines.append(f"kernel({', '.join([str(rows), *(f'{x}.data_ptr()' for x in given)])})")
        else:
            space["guard"] = torch.cuda.device(device)
            grid, block = (-(-rows // BLOCK), 1, 1), (BLOCK, 1, 1)
            lines.append(f"with guard: kernel({grid}, {block}, [{', '.join([str(rows), *given])}])")
        exec("\n    ".join([*lines, f"return {self.tree}"]), space)
        call: Callable[..., tuple[Any, Outcome]] = space["call"]
        return call

    def check(self, kernel: Any, device: torch.device) -> None:
        """Run the kernel on the rows of the trace: nearly all must come out as the operations gave them."""
        self.clone.device, before = device, self.clone.device
        got = self.bind(kernel, self.clone)(*self.example)
        self.clone.device = before
        for x, y in zip(tree_leaves(self.result), tree_leaves(got), strict=True):
            alike = torch.isclose(x.double(), y.cpu().double(), rtol=1e-3, atol=1e-4, equal_nan=True).reshape(ROWS, -1).all(1)
            if float(alike.double().mean()) < 0.98:  # not all: a distance may be rounded to either side of a threshold
                raise CannotFuse("its rows look at each other, or the kernel is wrong: it does not give what the step gives")


TEXT = {
    "cpu": """#include <math.h>
#include <stdbool.h>
void step(long long rows, {pointers}) {{
    for (long long r = 0; r < rows; r++) {{
        {lines}
    }}
}}
""",
    "cuda": """extern "C" __global__ void step(int rows_here, {pointers}) {{
    const long long rows = rows_here, r = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (r < rows) {{
        {lines}
    }}
}}
""",
}


def literal(node: Node) -> str:
    value, suffix = node.args[0], "f" if node.dtype == torch.float32 else ""
    if isinstance(value, bool | int):
        return str(int(value))
    if math.isnan(value):
        return f"(0.0{suffix} / 0.0{suffix})"
    return f"({math.copysign(1, value)}{suffix} / 0.0{suffix})" if math.isinf(value) else f"({value.hex()}{suffix})"


OWN = {"rows", "_tick", "_in_step", "_lockstep"}  # numbers that worlds of one config may differ in


def held(world: World) -> dict[str, Any]:
    """What a world holds, to be compared: numbers, and which tensors, as often written to."""
    plain = {k: v for k, v in vars(world).items() if isinstance(v, bool | int | float | str)}
    tensors = {k: (id(v), v._version) for k, v in vars(world).items() if isinstance(v, Tensor)}
    return {**plain, **tensors}


def refuse_other(clone: World, world: World) -> None:
    """The clone stands for the world: what was set on the world since it was made would be baked in as it was before."""
    for name, mine in vars(clone).items():
        yours = vars(world).get(name)
        number = isinstance(mine, bool | int | float | str) and name not in OWN and mine != yours
        other = False
        if isinstance(mine, Tensor) and isinstance(yours, Tensor) and mine.dim() > 0 and mine.shape == yours.shape:
            other = not torch.allclose(mine.double(), yours.cpu().double(), 1e-4, 1e-5, equal_nan=True)  # devices round
        if number or other:
            raise CannotFuse(f"its attribute {name!r} is not as its config makes it")


def example(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """A state after a few steps, actions and noise; the same each time."""
    g = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(world.rows, *shape, generator=g, dtype=world.dtype)

    def active() -> dict[str, Tensor]:
        actions = {}
        for group in world.spec.groups:
            x, space = uniform(group.n, *group.action.shape), group.action
            if isinstance(space, Box):
                low, high = world.tensor(space.low), world.tensor(space.high)
                actions[group.name] = low + x * (high - low)
            else:
                actions[group.name] = (x * world.tensor(space.sizes if space.shape else space.sizes[0])).long()
        return actions

    world.reset(uniform(world.noise))
    state = world.state
    for _ in range(3):
        state, _ = world._transition("any", state, active(), uniform(world.noise))
    state = {k: v.clone(memory_format=torch.contiguous_format) for k, v in state.items()}
    if world.spec.horizon:
        state["clock"] = (uniform() * world.spec.horizon).long()  # some rows are about to end
    return state, active(), uniform(world.noise)


# --- compilers --------------------------------------------------------------------------------------------------------


def compile_c(text: str) -> Any:
    step = library(text, FLAGS).step
    step.restype, step.argtypes = None, [ctypes.c_longlong] + [ctypes.c_void_p] * text.count("*__restrict__")
    return step


@cache
def compile_cuda(text: str, device: torch.device) -> Any:
    make = getattr(torch.cuda, "_compile_kernel", None)  # NVRTC: it needs no compiler on the machine
    if make is None:
        raise CannotFuse(f"PyTorch {torch.__version__} does not compile kernels, newer ones do")
    return make(text, "step", nvcc_options=["-fmad=false"])


def compiled(world: World, phase: Phase) -> Callable[..., tuple[Any, Outcome]]:
    try:
        with torch.no_grad(), torch.cuda.device(world.device) if world.device.type == "cuda" else nullcontext():
            program = Program(world, phase)
            text = program.write(world.device.type)
            if Program(world, phase).write(world.device.type) != text:
                raise CannotFuse("its step depends on something that is neither in its state nor passed in")
            kernel = compile_c(text) if world.device.type == "cpu" else compile_cuda(text, world.device)
            program.check(kernel, world.device)
    except CannotFuse:
        raise
    except Exception as e:  # a world may do anything: then it is not fused, and goes on as it was
        raise CannotFuse(f"following its step failed, {type(e).__name__}: {' '.join(str(e).split())[:300]}") from e
    return program.bind(kernel, world)


def fuse(world: World) -> str | None:
    """See above."""
    try:
        if world.device.type not in TEXT:
            raise CannotFuse(f"there is no compiler for {world.device.type}, only for {' and '.join(TEXT)}")
        calls = {phase: compiled(world, phase) for phase in world.phases}
    except CannotFuse as why:
        return f"{type(world).__name__} cannot be fused: {why}."

    def do(phase: Phase, state: State, actions: dict[str, Tensor], noise: Tensor) -> tuple[State, Outcome]:
        if phase not in calls:  # rows fell out of step
            try:
                calls[phase] = compiled(world, phase)
            except CannotFuse:
                calls[phase] = partial(world._transition, phase)
        return calls[phase](state, actions, noise)

    world._do = do
    return None
