"""Records what an update does on the CPU, once, and replays it: what a CUDA graph is to a GPU.

An update of small nets is some hundreds of tiny operations, and nearly all of its time goes to Python and to autograd between
them. Their order, shapes and addresses are the same each time. So one update is run under a dispatch mode that records
what reaches the processor: operations below autograd, those of the backward pass included, and calls of our own kernels. A
replay runs these alone, into the tensors that they made when they were recorded. They are the same operations on the
same numbers in the same order, so the bits are the same.

Views and allocations are not repeated. A decision that an update takes on the host must hold for every replay, so an update
that reads a number out of a tensor is not replayed. A recording keeps all tensors that were made in it.

`training/speedup.py` records the updates of the trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.kernels import native

aten = torch.ops.aten
READS_OUT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
ALLOCATES = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
COPIES = {aten.clone.default, aten._to_copy.default}
PLACES = {"dtype", "layout", "device", "pin_memory"}  # arguments that describe a result; here the result exists already
MOST = 1 << 28  # bytes that the recordings of a run may keep


class Recording(TorchDispatchMode):
    """`with recording:` records the operations inside, once; `recording.replay()` runs them again, on the same tensors.
    `broken`: why they cannot be replayed, in half a sentence, or none."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self.most = most
        self.steps: list[Callable[[], Any]] = []
        self.allocated: list[Tensor] = []  # memory that recorded calls of kernels point to
        self.bytes = 0
        self.broken: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled here. To make sure of it PyTorch would import its compiler, which takes a second."""
        return False

    def __enter__(self) -> Recording:
        self.kernels = native.recording(self.steps.append)
        self.kernels.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.kernels.__exit__(*error)

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for step in self.steps:
                step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if reads_out(func, args):
            self.broken = f"{func} reads a tensor out, or gives it another shape"
        elif self.broken:
            self.steps.clear()
        elif func._schema.is_mutable:
            self.steps.append(partial(func._op, *args, **kwargs))
        else:
            self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Record an operation that makes new tensors: a replay writes into `out`. A view of an argument needs no operation."""
        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        made = [x for x in tensors(out) if x.numel() and x.untyped_storage().data_ptr() not in given]
        self.bytes += sum(x.untyped_storage().nbytes() for x in made)
        if self.bytes > self.most:
            self.broken = f"they would keep more than {MOST >> 20} MiB"
        if not made:
            return
        if func in ALLOCATES:
            self.allocated += made
        elif func in COPIES:
            self.steps.append(partial(aten.copy_.default._op, out, args[0]))
        elif (into := out_variant(func)) is not None:
            name, variant, takes = into
            settings = {k: x for k, x in kwargs.items() if k in takes}
            self.steps.append(partial(variant._op, *args, **settings, **{name: out}))
        else:
            self.steps.append(partial(overwrite, func, args, kwargs, out))


def reads_out(func: Any, args: Any) -> bool:
    """Whether an operation gives the host numbers of a tensor, or a shape that depends on them: x[x > 0] does, x[indices] does
    not; or whether it changes the shape of a tensor in place."""
    if func.overloadpacket is aten.index:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return not READS_OUT.isdisjoint(func.tags)


def overwrite(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    """Run an operation that has no variant with an output, and copy its results into `out`."""
    for mine, x in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
        mine.copy_(x)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in the arguments, or in the results, of an operation."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [x for part in tree for x in tensors(part)]


@cache
def out_variant(func: Any) -> tuple[str, Any, set[str]] | None:
    """The variant of an operation that writes into a tensor: the name of that argument, the variant, its other arguments."""
    schema = func._schema
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    bare = [x for x in wanted if x[0] not in PLACES]
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        outs = [a.name for a in variant._schema.arguments if a.is_out]
        takes = [(a.name, str(a.type)) for a in variant._schema.arguments if not a.is_out]
        if len(outs) == 1 == len(schema.returns) and takes in (wanted, bare):
            return outs[0], variant, {k for k, _ in takes}
    return None
