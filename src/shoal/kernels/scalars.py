"""Scalar expressions of a program for one row: nodes that are made once, simplified and folded where both sides are literals.

`kernels/trace.py` builds them, `kernels/emit.py` writes them as C or CUDA C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

TYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}
FOLD: dict[str, Any] = {  # operation -> what computes it on literals
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "quo": lambda a, b: np.trunc(a / b),  # of integers, towards zero
    "mod": np.fmod,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "atan2": np.arctan2,
    "floor": np.floor,
    "ceil": np.ceil,
    "min": np.minimum,
    "max": np.maximum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "where": np.where,
    "cast": lambda a: a,
}
COMMUTE = {"add", "mul", "eq", "ne", "and", "or", "xor"}


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    op: str  # of FOLD; or lit, a literal value; or load, a cell of an input: which input, and which cell of its row
    dtype: torch.dtype
    args: tuple[Any, ...]


class Graph:
    """All nodes of a program. Equal expressions are one node."""

    def __init__(self) -> None:
        self.nodes: dict[Any, Node] = {}  # in the order they were made, which is one to compute them in

    def make(self, op: str, dtype: torch.dtype, *args: Any) -> Node:
        key = (op, dtype, *(x.hex() if isinstance(x, float) else x for x in args))  # hex: 0.0 is not -0.0
        return self.nodes.setdefault(key, Node(op, dtype, args))

    def lit(self, value: Any, dtype: torch.dtype) -> Node:
        return self.make("lit", dtype, TYPES[dtype](value).tolist())

    def do(self, op: str, dtype: torch.dtype, *args: Node) -> Node:
        """The node of an operation, or a simpler node with the same bits."""
        if all(x.op == "lit" for x in args):
            with np.errstate(all="ignore"):
                return self.lit(FOLD[op](*(TYPES[x.dtype](x.args[0]) for x in args)), dtype)
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
