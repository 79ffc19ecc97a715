"""Updates on the CPU as a tape: recorded once, played again and again. What a CUDA graph is to a GPU (`training/graph.py`).

An update of small nets is some hundreds of tiny operations, and nearly all of its time goes to Python and to autograd between
them. Their order, shapes and addresses are the same each time, so one update is run under a dispatch mode that writes down
what reaches the processor: operations below autograd, the backward pass among them, and calls of our own kernels. Playing
runs these alone, into the tensors that they made when they were recorded. The kernels are those that ran before, on the same
numbers in the same order: so are the bits.

What is only another view of a tensor need not be done again, nor what reserves memory. Whatever an update decides on the host
must hold for every play, so one that reads a tensor out is not recorded. All that was made is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.algos.base import Algorithm
from shoal.kernels import native
from shoal.training.offpolicy import OffPolicyTrainer

aten = torch.ops.aten
LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
RESERVES = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
COPIES = {aten.clone.default, aten._to_copy.default}
PLACES = {"dtype", "layout", "device", "pin_memory"}  # settings of a result, which is there already
MOST = 1 << 28  # bytes that a run's tapes may keep


class Recording(TorchDispatchMode):
    """`with recording:` records what is done, once; `recording.play()` does it again. `broken`: why it cannot, in half a
    sentence."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self.most = most
        self.steps: list[Callable[[], Any]] = []
        self.reserved: list[Tensor] = []  # that kernels point into
        self.bytes = 0
        self.broken: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """That nothing is compiled here is known: to make sure of it PyTorch would load its compiler, a second's work."""
        return False

    def __enter__(self) -> Recording:
        self.listening = native.recording(self.steps.append)
        self.listening.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.listening.__exit__(*error)

    def play(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for step in self.steps:
                step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if looks(func, args):
            self.broken = f"{func} reads a tensor out, or gives it another shape"
        elif self.broken:
            self.steps.clear()
        elif func._schema.is_mutable:
            self.steps.append(partial(func._op, *args, **kwargs))
        else:
            self._again(func, args, kwargs, out)
        return out

    def _again(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Have `out` written anew, unless it is a view of what was given."""
        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        made = [x for x in tensors(out) if x.numel() and x.untyped_storage().data_ptr() not in given]
        self.bytes += sum(x.untyped_storage().nbytes() for x in made)
        if self.bytes > self.most:
            self.broken = f"they would keep more than {MOST >> 20} MiB"
        if not made:
            return
        if func in RESERVES:
            self.reserved += made
        elif func in COPIES:
            self.steps.append(partial(aten.copy_.default._op, out, args[0]))
        elif (into := out_variant(func)) is not None:
            name, variant, takes = into
            told = {k: x for k, x in kwargs.items() if k in takes}
            self.steps.append(partial(variant._op, *args, **told, **{name: out}))
        else:
            self.steps.append(partial(renew, func, args, kwargs, out))


def looks(func: Any, args: Any) -> bool:
    """Whether the host comes to know numbers by it, or a shape that follows from them: that of x[x > 0], not of x[places]; or
    whether a tensor's shape is another one afterwards."""
    if func.overloadpacket is aten.index:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return not LOOKS.isdisjoint(func.tags)


def renew(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    for mine, x in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
        mine.copy_(x)


def tensors(tree: Any) -> list[Tensor]:
    """Those in the arguments, or the results, of an operation."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [x for part in tree for x in tensors(part)]


@cache
def out_variant(func: Any) -> tuple[str, Any, set[str]] | None:
    """The same operation with a tensor to write into: that argument's name, the operation, and what it takes."""
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


class Recorded:
    """A lesson, played from a tape for each kind of update that it comes to: the first time as it is, the second time recorded.
    It is the `k`-th of what a run `does`, and puts the lesson back there where it cannot be, with a `remark`."""

    def __init__(self, trainer: OffPolicyTrainer, does: list[Callable[[], None]], k: int, remark: Callable[[str], None]):
        self.trainer, self.does, self.k, self.remark = trainer, does, k, remark
        self.tapes: dict[int, Recording | None] = {}  # kind -> none: done once

    def __call__(self) -> None:
        kind = self.trainer.algorithm.variant()
        if (recording := self.tapes.get(kind)) is not None:
            return recording.play()
        if kind not in self.tapes:
            self.tapes[kind] = None  # what is made lazily is made
            return self.trainer.update_once()
        with Recording(
            MOST - sum(t.bytes for x in self.does if isinstance(x, Recorded) for t in x.tapes.values() if t)
        ) as recording:
            self.trainer.update_once()
        if recording.broken is None:
            self.tapes[kind] = recording
        else:
            self.does[self.k] = self.trainer
            self.remark(f"Updates cannot be recorded, and run operation by operation: {recording.broken}.")


def ours(algorithms: Iterable[Algorithm]) -> bool:
    """Whether all that an update runs is known to keep to tensors: what users bring may look at anything."""
    return all(
        type(a).__module__.startswith("shoal.") and a.net.module is None and getattr(a.config, "normaliser", None) is None
        for a in algorithms
    )
