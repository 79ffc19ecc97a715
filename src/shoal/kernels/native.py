"""Fused kernels for the CPU: what PyTorch does in many small operations, done in one call of C. `native.c` has the code, this
file calls it. `kernels/triton.py` has the same for CUDA.

    mlp                    a whole perceptron, one call each way: nets/layers.MLP
    choose                 a draw from a softmax and its log-probability: ops/distributions.Choice
    log_prob_and_entropy   both from one softmax, and their gradient: ops/distributions.Choice
    gae                    generalised advantage estimation: ops/returns.gae without turns
    ppo, value_loss        sums to descend, their gradients and what is logged of them: ops/losses.ppo and value
    adamw                  a step, clipped, and not taken where it would break something: algos/optimiser.Optimiser

`why_not()` says why they cannot be used here. `native.c` is compiled once, for the processor at hand, and kept
(`kernels/compiler.py`); it takes any widths. Large batches are taken in pieces, by as many threads as `share` was given.

How `mlp` works. Every product is C[r, 0..n] = init + sum_k A(r, k) B[k, 0..n] in registers, ROWS rows by up to four
vectors; A is read number by number, at any strides, B by vectors. Weights are copied once a call, in the direction
they are needed in and padded with zeros to whole vectors. Samples are taken in blocks that stay in the cache, through all
layers. Going forward the hidden layers are kept if there will be a gradient, rows padded as the weights are; going
backward each block is added to the gradients' sums. The order of all sums is fixed: the same input gives the same
bits. The gradients are views of one vector, in the order of `MLP.parameters()`: ids, weights, biases.

NaN and infinity go through everything, so that a loss that diverged is seen: the flags allow no assumption against them.
(Only exp ends at e^88, where PyTorch's gives infinity.) There are no second derivatives: asking for them raises.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.kernels.compiler import CannotFuse, library, processor

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-shared", "-fPIC", "-lm")
ROWS = 4  # of a product's tile, as in native.c
WIDEST = {"in": 512, "hidden": 256, "out": 64, "ids": 64}  # the widest layers, and the most agents with ids, that `mlp` takes
PIECE, MOST_PIECES = 2048, 64  # samples from which on a batch is shared out, and into how many pieces at most
BLOCK = 64  # samples that go through the layers together: the largest multiple of ROWS and of the agents below it


class _Recorder(threading.local):
    record: Callable[[Callable[[], Any]], None] | None = None  # none: nothing is being recorded in this thread


_recorder = _Recorder()


@contextmanager
def recording(record: Callable[[Callable[[], Any]], None]) -> Iterator[None]:
    """Inside, `record` is given every call of a kernel, as a function that makes the same call on the same memory."""
    _recorder.record = record
    try:
        yield
    finally:
        _recorder.record = None


class _RecordedKernels:
    """The kernels, each of which is run and recorded."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        kernel = getattr(_library(), name)

        def call(*given: Any) -> None:
            kernel(*given)
            assert _recorder.record is not None
            _recorder.record(functools.partial(kernel, *given))

        return call


def _kernels() -> Any:
    return _library() if _recorder.record is None else _RecordedKernels()


@functools.cache
def _library() -> Any:
    flags, meaning = processor()
    made = library(SOURCE.read_text(), (*FLAGS, *flags), meaning)
    pointer, wide, real = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_double
    for name, arguments in {
        "mlp_forward": [pointer, wide, *[pointer] * 5],
        "mlp_backward": [pointer] * 8,
        "choose": [wide] * 2 + [pointer] * 4,
        "log_prob_and_entropy": [wide] * 2 + [pointer] * 5,
        "ppo": [wide, *[real] * 2, *[pointer] * 8],
        "value_loss": [wide, *[real] * 2, *[pointer] * 7],
        "adamw": [wide, *[real] * 2, *[pointer] * 9],
        "gae": [wide] * 6 + [real] * 2 + [pointer] * 6,
    }.items():
        kernel = getattr(made, name)
        kernel.restype, kernel.argtypes = None, arguments
    return made


def why_not() -> str | None:
    """Why the kernels cannot be used here: one sentence, or None."""
    try:
        _library()
    except CannotFuse as why:
        return f"Perceptrons are not fused on the CPU: {why}."
    return None


def _want(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    """Check dtypes here: C takes any pointer for one of its own type."""
    for x in tensors:
        assert x is None or x.dtype == dtype, f"a kernel that takes {dtype} was given {x.dtype}"


# --- perceptrons ---


def mlp_fits(
    width_in: int, hidden: Sequence[int], width_out: int, ids: int = 0, activation: str = "tanh", tf32: bool = False
) -> bool:
    """Whether `mlp` takes a perceptron of this shape; `ids` is the number of agents that have one, or 0."""
    if not (activation in ("tanh", "relu") and 1 <= len(hidden) <= 3 and max(hidden) <= WIDEST["hidden"]):
        return False
    return width_in <= WIDEST["in"] and width_out <= WIDEST["out"] and ids <= WIDEST["ids"] and why_not() is None


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    ids: Tensor | None = None,
    activation: str = "tanh",
    tf32: bool = False,
) -> Tensor:
    """x [..., N, in] -> [..., N, out]. weights [out, in] and biases [out] for all agents and ids [N, hidden] or None; or
    for each agent its own, weights [N, in, out] and biases [N, 1, out]. There is no `tf32` here."""
    assert x.dtype == weights[0].dtype == torch.float32, "mlp wants float32"
    assert x.shape[-1] == weights[0].shape[1], f"mlp wants inputs of width {weights[0].shape[1]}"
    params = (ids, *weights, *biases)
    if torch.is_grad_enabled():
        return _MLP.apply(x, activation, *params)
    return _forward(x.contiguous(), activation, params, keep=False)[0]


def _forward(x: Tensor, activation: str, params: tuple[Tensor | None, ...], keep: bool) -> tuple[Tensor, list[Any]]:
    """The output, and for each piece of the samples its plan and, to be kept, its hidden layers."""
    assert all(p is None or p.is_contiguous() for p in params), "mlp wants parameters that are contiguous"
    pointers = (ctypes.c_void_p * len(params))(*[None if p is None else p.data_ptr() for p in params])
    shapes = tuple([p.shape for p in params[1 : 1 + len(params) // 2]])  # type: ignore[union-attr]
    ids = None if params[0] is None else params[0].shape[0]
    y = x.new_empty(_planned(x.shape, shapes, ids, activation).output)

    def piece(part: tuple[Tensor, Tensor]) -> tuple[_Plan, Any, Tensor]:
        x, y = part
        plan = _planned(x.shape, shapes, ids, activation)
        scratch = x.new_empty(plan.forward + (plan.hidden if keep else plan.block))
        at = scratch.data_ptr()
        _kernels().mlp_forward(plan.shape, keep, x.data_ptr(), pointers, at + 4 * plan.forward, y.data_ptr(), at)
        return plan, pointers, scratch

    return y, _each(piece, list(zip(_pieces(x), _pieces(y), strict=True)))


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, *params: Tensor | None) -> Tensor:
        x = x.contiguous()
        y, ctx.made = _forward(x, activation, params, keep=True)
        ctx.save_for_backward(x, *params)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *params = ctx.saved_tensors
        sizes = [0 if p is None else p.numel() for p in params]
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        learns = any(ctx.needs_input_grad[2:])  # else the weights are frozen, and need no gradients
        flats = x.new_empty(len(ctx.made), sum(sizes) if learns else 0)

        def piece(part: tuple[Any, ...]) -> None:
            (plan, pointers, hidden), x, grad, grad_x, flat = part
            scratch, kept = x.new_empty(plan.backward), hidden.data_ptr() + 4 * plan.forward
            to = None if grad_x is None else grad_x.data_ptr()
            given = x.data_ptr(), pointers, kept, grad.data_ptr(), to, flat.data_ptr() if learns else None, scratch.data_ptr()
            _kernels().mlp_backward(plan.shape, *given)

        nothing = [None] * len(ctx.made)
        parts = _pieces(x), _pieces(grad.contiguous()), nothing if grad_x is None else _pieces(grad_x), flats
        _each(piece, list(zip(ctx.made, *parts, strict=True)))
        if not learns:
            return grad_x, None, *(None for _ in params)
        flat = flats[0] if len(flats) == 1 else flats.sum(0)
        grads = (None if p is None else part.view_as(p) for part, p in zip(flat.split(sizes), params, strict=True))
        return grad_x, None, *grads


# --- cores ---

_pool: ThreadPoolExecutor | None = None


def share(threads: int) -> None:
    """Let so many threads work on the pieces of large batches. PyTorch's own would spin while they wait; these sleep."""
    global _pool
    if (_pool._max_workers if _pool else 1) != threads:
        _pool = ThreadPoolExecutor(threads) if threads > 1 else None


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """[..., N, width] as pieces of samples that follow each other: as many whatever the threads, for bits follow from it."""
    samples = x.shape[:-1].numel()
    return (x,) if samples < 2 * PIECE else x.view(-1, *x.shape[-2:]).tensor_split(min(samples // PIECE, MOST_PIECES))


def _each(work: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
    pool = _pool
    if _recorder.record is not None and len(parts) > 1:
        return _each_recorded(work, parts)
    return [work(p) for p in parts] if pool is None or len(parts) == 1 else list(pool.map(work, parts))


def _each_recorded(work: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
    """Run the parts one after another; record them as parts that threads can share."""
    record, made = _recorder.record, []
    groups: list[list[Callable[[], Any]]] = [[] for _ in parts]
    for part, group in zip(parts, groups, strict=True):
        _recorder.record = group.append
        made.append(work(part))
    _recorder.record = record
    assert record is not None
    record(functools.partial(_each, _call, groups))
    return made


def _call(group: list[Callable[[], Any]]) -> None:
    """Call the kernels of one part."""
    for kernel in group:
        kernel()


def _forked() -> None:
    """Forget the pool in a child process: it has none of its parent's threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class _Plan(NamedTuple):
    """The struct `shape` of native.c; and how many numbers to allocate for each part."""

    shape: Any
    output: tuple[int, ...]  # its shape
    hidden: int  # layers of all samples
    block: int  # hidden layers of a block
    forward: int  # scratch going forward
    backward: int  # and back


@functools.lru_cache(1024)
def _planned(x: torch.Size, weights: tuple[torch.Size, ...], ids: int | None, activation: str) -> _Plan:
    own = len(weights[0]) == 3
    widths = [w[1] for w in weights] + [weights[-1][2 if own else 0]]
    assert not own or (weights[0][0] == x[-2] and ids is None), "mlp wants a set of weights an agent, and no ids"
    assert ids in (None, x[-2]), "mlp wants an id for each agent"
    sets, step = x[-2] if own else 1, math.lcm(ROWS, ids or 1)
    count, block = x[:-1].numel() // sets, max(step, BLOCK // step * step)
    shape = (ctypes.c_longlong * 12)(count, sets, own, len(weights), ids or 0, block, activation == "tanh", *widths)
    pads = [-(-w // 16) * 16 for w in widths]
    weight, hidden, widest = sum(a * b for a, b in pairwise(pads)), sum(pads[1:-1]), max(pads)
    forward = weight + sum(pads) + block * (pads[1] + pads[-1])
    backward = 2 * weight + sum(pads) + (ids or 0) * pads[1] + (1 + 2 * block) * widest
    return _Plan(shape, (*x[:-1], widths[-1]), sets * count * hidden, block * hidden, forward, backward)


# --- a choice among few ---


def choose(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A draw from softmax(logits) by Gumbel's maximum, and its log-probability, without a gradient: [..., A] -> [...]."""
    assert logits.shape == noise.shape, "choose wants a number of noise for each logit"
    _want(torch.float32, logits, noise)
    logits, noise = logits.contiguous(), noise.contiguous()
    log_prob = logits.new_empty(logits.shape[:-1])
    action = torch.empty_like(log_prob, dtype=torch.int64)
    _kernels().choose(
        log_prob.numel(), logits.shape[-1], logits.data_ptr(), noise.data_ptr(), action.data_ptr(), log_prob.data_ptr()
    )
    return action, log_prob


def log_prob_and_entropy(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Of one categorical, unmasked: logits [..., A], action int64 [...] -> log pi(a) and the entropy [...]."""
    return _LogProbAndEntropy.apply(logits, action)


class _LogProbAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        assert logits.shape[:-1] == action.shape, "log_prob_and_entropy wants an action for each row of logits"
        _want(torch.float32, logits)
        _want(torch.int64, action)
        logits, action = logits.contiguous(), action.contiguous()
        log_prob, entropy = logits.new_empty(action.shape), logits.new_empty(action.shape)
        _softmaxes(logits, action, log_prob, entropy, None)
        ctx.save_for_backward(logits, action)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None]:
        logits, action = ctx.saved_tensors
        grad = torch.empty_like(logits)
        _softmaxes(logits, action, grad_log_prob.contiguous(), grad_entropy.contiguous(), grad)
        return grad, None


def _softmaxes(logits: Tensor, action: Tensor, log_prob: Tensor, entropy: Tensor, grad: Tensor | None) -> None:
    pointers = [x.data_ptr() for x in (logits, action, log_prob, entropy)]
    _kernels().log_prob_and_entropy(action.numel(), logits.shape[-1], *pointers, None if grad is None else grad.data_ptr())


# --- advantages ---


def gae(
    reward: Tensor, value_t: Tensor, value_tp1: Tensor, terminated: Tensor, cut: Tensor, gamma: float, lam: float
) -> Tensor:
    """ops/returns.gae without turns; everything [T, B, N]. `cut` may be expanded along agents."""
    shape = reward.shape
    assert value_t.shape == value_tp1.shape == terminated.shape == cut.shape == shape, "gae wants everything [T, B, N]"
    _want(torch.float32, reward, value_t, value_tp1)
    _want(torch.bool, terminated, cut)
    values = [x.contiguous() for x in (reward, value_t, value_tp1, terminated)]
    advantage = torch.empty_like(values[0])
    pointers = [x.data_ptr() for x in (*values, cut, advantage)]
    _kernels().gae(*shape, *cut.stride(), gamma, lam, *pointers)
    return advantage


# --- losses, and the step down them ---


def ppo(
    log_prob: Tensor, entropy: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor | None, clip: float, weight: float
) -> tuple[Tensor, Tensor]:
    """ops/losses.ppo: the sum to descend, and means [4]."""
    return _Loss.apply("ppo", clip, weight, 2, 4, mask, log_prob, entropy, old_log_prob, advantage)


def value_loss(
    value: Tensor, old_value: Tensor | None, target: Tensor, mask: Tensor | None, clip: float, huber: float | None
) -> tuple[Tensor, Tensor]:
    """ops/losses.value: the sum to descend, and the mean [1]."""
    return _Loss.apply("value_loss", clip, huber or 0.0, 1, 1, mask, value, old_value, target)


class _Loss(torch.autograd.Function):
    """A sum over samples, by a kernel that finds the gradient on the way: by the first `of` of the inputs."""

    @staticmethod
    def forward(
        ctx: Any, kernel: str, a: float, b: float, of: int, means: int, mask: Tensor | None, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        first = inputs[0]
        assert first is not None
        _want(torch.float32, *inputs)
        _want(torch.bool, mask)
        like = first.shape
        held = [x if x is None or x.shape == like else x.expand(like) for x in (*inputs, mask)]
        held = [None if x is None else x.contiguous() for x in held]
        total, ctx.grad, mean = first.new_empty(()), first.new_empty(of, *first.shape), first.new_empty(means)
        pointers = [None if x is None else x.data_ptr() for x in (*held, total, ctx.grad, mean)]
        getattr(_kernels(), kernel)(first.numel(), a, b, *pointers)
        ctx.mark_non_differentiable(mean)
        ctx.others = len(inputs) - of
        return total, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        return None, None, None, None, None, None, *(ctx.grad * grad).unbind(), *[None] * ctx.others


def adamw(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    steps: Tensor,
    rate: Tensor,
    broken: Tensor,
    keep: Tensor | None,
    clip: float | None,
    decay: float,
) -> Tensor:
    """algos/optimiser.Optimiser's step, in place. Returns the norm of the gradient before clipping."""
    _want(torch.float32, weight, grad, first, second, steps, rate)
    _want(torch.bool, broken, keep)
    norm = torch.empty_like(steps)
    held = (rate, keep, weight, grad, first, second, steps, broken, norm)
    pointers = [None if x is None else x.data_ptr() for x in held]
    _kernels().adamw(weight.numel(), clip or 0.0, decay, *pointers)
    return norm
