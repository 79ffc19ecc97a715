"""Writes the program for one row, which `kernels/trace.py` recorded, as C for the CPU or as CUDA C.

On the CPU the program stands in a loop over rows; on CUDA each thread has a row. Arithmetic is IEEE's, in the order of the
trace: no contraction and no fast math. Sums run from left to right.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from shoal.kernels.compiler import CannotFuse
from shoal.kernels.scalars import Node

MOST = {"cpu": 6000, "cuda": 2500}  # statements in a kernel: a few seconds of compiling
TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "long long",
    torch.int32: "int",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
}
C = {  # operation -> C; {f} is the suffix of C's float functions, {t} the type of the result
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "quo": "{1} ? {0} / {1} : 0",
    "mod": "{1} ? {0} % {1} : 0",
    "neg": "-{0}",
    "abs": "fabs{f}({0})",
    "sqrt": "sqrt{f}({0})",
    "exp": "exp{f}({0})",
    "log": "log{f}({0})",
    "log1p": "log1p{f}({0})",
    "sin": "sin{f}({0})",
    "cos": "cos{f}({0})",
    "atan2": "atan2{f}({0}, {1})",
    "floor": "floor{f}({0})",
    "ceil": "ceil{f}({0})",
    "min": "{0} < {1} || {0} != {0} ? {0} : {1}",
    "max": "{0} > {1} || {0} != {0} ? {0} : {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "where": "{0} ? {1} : {2}",
    "cast": "({t}){0}",
}
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


def write(
    device: str,
    order: Sequence[Node],
    inputs: Sequence[Tensor],
    loaded: Collection[int],
    outputs: Sequence[tuple[torch.dtype, Sequence[Sequence[Node]]]],
) -> str:
    """The source of a kernel, for "cpu" or "cuda". order: the nodes, in an order to compute them in; inputs: tensors of the
    trace; loaded: which of them the kernel reads; outputs: the dtype of each allocation, and the cells of each tensor in it."""
    statements = sum(n.op != "lit" for n in order)
    if statements > MOST[device]:
        raise CannotFuse(f"its step is too large for one kernel, {statements} statements where {MOST[device]} may be")
    name: dict[Node, str] = {}
    body = []
    for node in order:
        if node.op == "lit":
            name[node] = literal(node)
            continue
        kind = TYPES[node.dtype]
        if node.op == "load":
            i, k = node.args
            shape = inputs[i].shape
            line = f"x{i}[{f'r * {shape[1:].numel()} + {k}' if shape else 0}]"  # a scalar is the same in all rows
        else:
            suffix = "f" if node.dtype == torch.float32 else ""
            line = C[node.op].format(*(name[x] for x in node.args), f=suffix, t=kind)
        name[node] = f"v{len(name)}"
        body.append(f"const {kind} {name[node]} = {line};")
    for g, (_, leaves) in enumerate(outputs):
        for k, cells in enumerate(leaves):
            for j, node in enumerate(cells):
                body.append(f"y{g}[rows * {k * len(cells)} + r * {len(cells)} + {j}] = {name[node]};")
    reads = [f"const {TYPES[inputs[i].dtype]} *__restrict__ x{i}" for i in loaded]
    writes = [f"{TYPES[dtype]} *__restrict__ y{g}" for g, (dtype, _) in enumerate(outputs)]
    return TEXT[device].format(pointers=", ".join(reads + writes), lines="\n        ".join(body))


def literal(node: Node) -> str:
    """A literal in C, with all of its bits."""
    value, suffix = node.args[0], "f" if node.dtype == torch.float32 else ""
    if isinstance(value, bool | int):
        return str(int(value))
    if math.isnan(value):
        return f"(0.0{suffix} / 0.0{suffix})"
    return f"({math.copysign(1, value)}{suffix} / 0.0{suffix})" if math.isinf(value) else f"({value.hex()}{suffix})"
