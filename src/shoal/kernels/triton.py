"""Fused kernels for CUDA, in Triton: what PyTorch does in many small launches, done in one. Nothing here waits for the host,
so that everything can be captured in a graph.

    mlp                    a whole perceptron, forward in one kernel, backward in one and a sum: nets/layers.MLP
    choose                 a draw from a softmax and its log-probability: ops/distributions.Choice
    log_prob_and_entropy   both from one softmax, and their gradient: ops/distributions.Choice
    gae                    generalised advantage estimation: ops/returns.gae without turns

`why_not()` says why they cannot be used here. With TRITON_INTERPRET=1 they run on the CPU, slowly, for tests.

How `mlp` works. A program holds all weights and walks over tiles of samples; hidden layers never leave the chip. The one-hot
ids are columns of the first layer that are made up in registers. Going backward a program computes the hidden layers anew,
sums the gradients of its tiles in registers and writes them as one row of a table [programs, parameters]; the table is
summed over programs in a fixed order, so that the same input gives the same bits. The gradients are views of that one
sum, in the order of `MLP.parameters()`: ids, weights, biases.
"""

# Kernels: constants are in capitals, tuples grow by addition (all that Triton knows), and nothing has a type.
# ruff: noqa: N803, N806, RUF005
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
WIDEST = {"in": 256, "hidden": 128, "out": 64}  # the widest layers that `mlp` takes; "in" counts the ids
# Settings of `mlp`: samples a program handles at once, warps, and programs a multiprocessor. `few` serves all; `many`, tiles
# that Hopper's tensor cores take whole, those of many samples whose weights leave room for them. Chosen from what compiles
# without spilling registers (but for a few hundred bytes in the last); exact products of wider layers spill: PyTorch's.
MANY, ROOM = 1 << 14, 10 * 1024  # samples from which on there are many; padded weights for larger tiles or exact products
FORWARD = {"few": (16, 8, 4), "many": (64, 4, 3)}
BACKWARD = {"few": (16, 8, 2), "many": (64, 4, 2)}
EXACT = "ieee"  # products where TF32 is not allowed; "tf32x3" is the other choice, and takes twice the shared memory
LOGITS = 512  # what a program of the softmax kernels holds, padding included
LANES, AHEAD = 32, 4  # gae: agents of rows that a program walks back in time with, and steps it reads at once


class _Missing:
    """What stands for a kernel where there is no Triton."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        raise ImportError(why_not())

    def warmup(self, *args: Any, **constants: Any) -> None:
        raise ImportError(why_not())


_jit: Any = _Missing if triton is None else triton.jit(do_not_specialize=["count", "tiles", "steps"])


def why_not() -> str | None:
    """Why the kernels cannot be used here: one sentence, or None."""
    if triton is None:
        return "Triton is not installed: pip install triton."
    if INTERPRET:
        return None
    if not torch.cuda.is_available():
        return "Triton's kernels need an NVIDIA GPU, and PyTorch sees none."
    if torch.cuda.get_device_capability() < (8, 0):
        return f"Triton's kernels need a GPU of compute capability 8.0 or more; {torch.cuda.get_device_name()} has less."
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler to launch kernels: install gcc or set CC."
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton needs Python's headers to launch kernels: install python3-dev."
    return None


# --- launching ---

_pool: ThreadPoolExecutor | None = None
_ordered: set[Any] = set()  # what the pool compiles


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, kernels are not run but compiled, several at once, and what they would write is zero. Whoever will run some
    code does so once in here, and undoes it, and need not wait for one kernel after the other."""
    global _pool
    with ThreadPoolExecutor(8) as pool:
        _pool = pool
        _ordered.clear()
        try:
            yield
        finally:
            _pool = None


def _launch(kernel: Any, grid: tuple[int, ...], outputs: Iterable[Tensor | None], *args: Any, **constants: Any) -> None:
    if _pool is None:
        kernel[grid](*args, **constants)
        return
    for x in outputs:
        if x is not None:
            x.zero_()
    key = kernel, _signature(args), tuple(constants.items())
    if key not in _ordered:
        _ordered.add(key)
        _pool.submit(kernel.warmup, *args, grid=grid, **constants)


def _signature(args: Any) -> Any:
    """What a kernel is compiled for: types and alignment, and numbers."""
    if isinstance(args, tuple):
        return tuple(_signature(x) for x in args)
    return (args.dtype, args.data_ptr() % 16) if isinstance(args, Tensor) else args


# --- perceptrons ---


def mlp_fits(
    width_in: int, hidden: Sequence[int], width_out: int, ids: int = 0, activation: str = "tanh", tf32: bool = False
) -> bool:
    """Whether `mlp` takes a perceptron of this shape; `ids` is the number of agents that have one, or 0."""
    if not (activation in ("tanh", "relu") and 1 <= len(hidden) <= 3 and width_in + ids <= WIDEST["in"]):
        return False
    if max(hidden) > WIDEST["hidden"] or width_out > WIDEST["out"]:
        return False
    tile = BACKWARD["few"][0]
    pads = _pads((width_in, *hidden, width_out), ids, tile)
    held = 2 * _weights(pads) - pads[-2] * pads[-1]  # in shared memory: as they are and transposed, but for the last
    shared = _chip(torch.device("cpu" if INTERPRET else "cuda"))[1]
    return 4 * (held + tile * (sum(pads) + 128)) <= shared and (tf32 or _weights(pads) <= ROOM)


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    ids: Tensor | None = None,
    activation: str = "tanh",
    tf32: bool = False,
) -> Tensor:
    """x [..., N, in] -> [..., N, out]. weights [out, in] and biases [out] for all agents and ids [N, hidden] or None; or
    for each agent its own, weights [N, in, out] and biases [N, 1, out]."""
    return _MLP.apply(x, activation, "tf32" if tf32 else EXACT, len(weights), ids, *weights, *biases)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation: str, precision: str, layers: int, ids: Tensor | None, *params: Tensor
    ) -> Tensor:
        n, weights, own = x.shape[-2], params[:layers], params[0].dim() == 3
        widths = (*(w.shape[-2 if own else -1] for w in weights), weights[-1].shape[-1 if own else -2])
        assert not own or (weights[0].shape[0] == n and ids is None), "mlp wants a set of weights an agent, and no ids"
        assert x.shape[-1] == widths[0], f"mlp wants inputs of width {widths[0]}"
        assert all(p.is_contiguous() for p in params), "mlp wants parameters that are contiguous"
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], widths[-1])
        agents = 1 if ids is None and not own else n
        ctx.shape = {"WIDTHS": widths, "N": agents, "OWN": own, "TANH": activation == "tanh", "PRECISION": precision}
        grid, numbers, constants = _plan(FORWARD, x, ids, ctx.shape)
        _launch(_mlp_forward, grid, [y], x, params, ids, y, *numbers, **constants)
        ctx.save_for_backward(x, ids, *params)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, ids, *params = ctx.saved_tensors
        sizes = [0 if ids is None else ids.numel(), *(p.numel() for p in params)]
        grid, numbers, constants = _plan(BACKWARD, x, ids, ctx.shape)
        table = x.new_empty(grid[0], sum(sizes))
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        ends = tuple(accumulate(sizes))
        given = x, tuple(params), ids, grad.contiguous(), grad_x, table
        _launch(_mlp_backward, grid, [table, grad_x], *given, *numbers, ENDS=ends, **constants)
        parts = (table[0] if grid[0] == 1 else table.sum(0)).split(sizes)
        grads = [part.view_as(p) for part, p in zip(parts[1:], params, strict=True)]
        return grad_x, None, None, None, None if ids is None else parts[0].view_as(ids), *grads


def _plan(
    settings: dict[str, tuple[int, int, int]], x: Tensor, ids: Tensor | None, shape: dict[str, Any]
) -> tuple[tuple[int, int], tuple[int, int], dict[str, Any]]:
    """The grid: programs along samples, and sets of weights; how many samples and tiles a set has; the kernel's constants."""
    sets, extra = shape["N"] if shape["OWN"] else 1, 0 if ids is None else len(ids)
    count = x[..., 0].numel() // sets
    multiprocessors, shared = _chip(x.device)
    roomy = shape["PRECISION"] == "tf32" and shared > 200_000 and _weights(_pads(shape["WIDTHS"], extra, 64)) <= ROOM
    tile, warps, most = settings["many" if count >= MANY and roomy else "few"]
    tiles = -(-count // tile)
    grid = min(tiles, max(1, most * multiprocessors // sets)), sets
    constants = {"PADS": _pads(shape["WIDTHS"], extra, tile), "TILE": tile, "num_warps": warps, "num_stages": 1}
    return grid, (count, tiles), shape | constants


def _pads(widths: tuple[int, ...], ids: int, tile: int) -> tuple[int, ...]:
    """Widths as the kernels hold them. Products wider than a small tile make Triton part columns among the warps; of rows
    there are too few, and every warp would do the work of all."""
    least = 2 * tile if tile < 64 else 16
    return tuple(max(least, 1 << (w - 1).bit_length()) for w in (widths[0] + ids, *widths[1:]))


def _weights(pads: tuple[int, ...]) -> int:
    return sum(a * b for a, b in pairwise(pads))


@functools.cache
def _chip(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 2, 232_448
    chip = torch.cuda.get_device_properties(device)
    return chip.multi_processor_count, chip.shared_memory_per_multiprocessor - 1024  # the system keeps 1024


@_jit
def _places(k: tl.constexpr, WIDTHS: tl.constexpr, PADS: tl.constexpr, N: tl.constexpr, OWN: tl.constexpr):
    """Where layer k's weights lie, as [out, in]: offsets and which of them exist. The same for ids, columns beyond `in`."""
    o, i = tl.arange(0, PADS[k + 1])[:, None], tl.arange(0, PADS[k])[None, :]
    there = (o < WIDTHS[k + 1]) & (i < WIDTHS[k])
    ids_there = (o < WIDTHS[k + 1]) & (i >= WIDTHS[k]) & (i < WIDTHS[k] + N)
    at = i * WIDTHS[k + 1] + o if OWN else o * WIDTHS[k] + i
    return at, there, (i - WIDTHS[k]) * WIDTHS[k + 1] + o, ids_there


@_jit
def _load(theta, ids, agent, WIDTHS: tl.constexpr, PADS: tl.constexpr, N: tl.constexpr, OWN: tl.constexpr):
    """Weights [out, in] and biases [1, out] of all layers, padded with zeros; the first layer's weights are followed by ids.
    (An argument of the name `params` trips Triton 3.6: its launcher has a variable of that name.)"""
    LAYERS: tl.constexpr = len(WIDTHS) - 1
    weights, biases = (), ()
    for k in tl.static_range(LAYERS):
        at, there, ids_at, ids_there = _places(k, WIDTHS, PADS, N, OWN)
        w = tl.load(theta[k] + agent * (WIDTHS[k] * WIDTHS[k + 1]) + at, mask=there, other=0.0)
        if k == 0 and ids is not None:
            w += tl.load(ids + ids_at, mask=ids_there, other=0.0)
        o = tl.arange(0, PADS[k + 1])[None, :]
        b = tl.load(theta[LAYERS + k] + agent * WIDTHS[k + 1] + o, mask=o < WIDTHS[k + 1], other=0.0)
        weights, biases = weights + (w,), biases + (b,)
    return weights, biases


@_jit
def _rows(tile, agent, count, N: tl.constexpr, OWN: tl.constexpr, TILE: tl.constexpr):
    """The rows of x that a tile holds [TILE, 1], and which of them exist."""
    sample = tile * TILE + tl.arange(0, TILE)[:, None]
    return (sample * N + agent if OWN else sample).to(tl.int64), sample < count


@_jit
def _input(x, row, there, ids, WIDTH: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr):
    """A tile of x [TILE, in], followed by the one-hot ids."""
    i = tl.arange(0, PAD)[None, :]
    x = tl.load(x + row * WIDTH + i, mask=there & (i < WIDTH), other=0.0)
    if ids is not None:
        x = tl.where(i == WIDTH + row.to(tl.int32) % N, 1.0, x)
    return x


@_jit
def _active(z, TANH: tl.constexpr):
    if TANH:
        return 1 - 2 / (tl.exp(2 * z) + 1)  # exact to 1e-7; e^2z may be infinite
    return tl.where(z < 0, 0.0, z)


@_jit
def _hidden(x, weights, biases, TANH: tl.constexpr, PRECISION: tl.constexpr):
    """The input and every hidden layer."""
    layers = (x,)
    for k in tl.static_range(len(weights) - 1):
        z = tl.dot(layers[k], tl.trans(weights[k]), input_precision=PRECISION) + biases[k]
        layers = layers + (_active(z, TANH),)
    return layers


@_jit
def _mlp_forward(
    x, theta, ids, y, count, tiles,
    WIDTHS: tl.constexpr, PADS: tl.constexpr, N: tl.constexpr, OWN: tl.constexpr, TANH: tl.constexpr,
    PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    LAST: tl.constexpr = len(WIDTHS) - 1
    agent = tl.program_id(1)
    weights, biases = _load(theta, ids, agent, WIDTHS, PADS, N, OWN)
    o = tl.arange(0, PADS[LAST])[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, there = _rows(tile, agent, count, N, OWN, TILE)
        layers = _hidden(_input(x, row, there, ids, WIDTHS[0], PADS[0], N), weights, biases, TANH, PRECISION)
        out = tl.dot(layers[LAST - 1], tl.trans(weights[LAST - 1]), input_precision=PRECISION) + biases[LAST - 1]
        tl.store(y + row * WIDTHS[LAST] + o, out, mask=there & (o < WIDTHS[LAST]))


@_jit
def _mlp_backward(
    x, theta, ids, grad, grad_x, table, count, tiles, ENDS: tl.constexpr,
    WIDTHS: tl.constexpr, PADS: tl.constexpr, N: tl.constexpr, OWN: tl.constexpr, TANH: tl.constexpr,
    PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    LAST: tl.constexpr = len(WIDTHS) - 1
    agent = tl.program_id(1)
    weights, biases = _load(theta, ids, agent, WIDTHS, PADS, N, OWN)
    sums_w, sums_b = (), ()  # the gradients of this program's tiles
    for k in tl.static_range(LAST):
        sums_w = sums_w + (tl.zeros_like(weights[k]),)
        sums_b = sums_b + (tl.zeros_like(biases[k]),)
    o = tl.arange(0, PADS[LAST])[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, there = _rows(tile, agent, count, N, OWN, TILE)
        layers = _hidden(_input(x, row, there, ids, WIDTHS[0], PADS[0], N), weights, biases, TANH, PRECISION)
        g = tl.load(grad + row * WIDTHS[LAST] + o, mask=there & (o < WIDTHS[LAST]), other=0.0)  # by the layer's output
        new_w, new_b = (), ()
        for k in tl.static_range(LAST - 1, -1, -1):
            new_w = (tl.dot(tl.trans(g), layers[k], sums_w[k], input_precision=PRECISION),) + new_w
            new_b = (sums_b[k] + tl.sum(g, 0, keep_dims=True),) + new_b
            if k > 0:
                g = tl.dot(g, weights[k], input_precision=PRECISION)
                g = g * (1 - layers[k] * layers[k]) if TANH else tl.where(layers[k] > 0, g, 0.0)
        sums_w, sums_b = new_w, new_b
        if grad_x is not None:
            i = tl.arange(0, PADS[0])[None, :]
            g = tl.dot(g, weights[0], input_precision=PRECISION)
            tl.store(grad_x + row * WIDTHS[0] + i, g, mask=there & (i < WIDTHS[0]))
    table += tl.program_id(0).to(tl.int64) * ENDS[2 * LAST]
    for k in tl.static_range(LAST):
        at, there, ids_at, ids_there = _places(k, WIDTHS, PADS, N, OWN)
        tl.store(table + ENDS[k] + agent * (WIDTHS[k] * WIDTHS[k + 1]) + at, sums_w[k], mask=there)
        if k == 0 and ids is not None:
            tl.store(table + ids_at, sums_w[k], mask=ids_there)
        o = tl.arange(0, PADS[k + 1])[None, :]
        tl.store(table + ENDS[LAST + k] + agent * WIDTHS[k + 1] + o, sums_b[k], mask=o < WIDTHS[k + 1])


# --- categorical distributions ---


def choose(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """logits and uniform noise [..., A] -> the action drawn by Gumbel's maximum, and its log-probability [...]."""
    assert logits.shape == noise.shape, "choose wants a number of noise for each logit"
    logits, noise = logits.contiguous(), noise.contiguous()
    action = logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    log_prob = logits.new_empty(logits.shape[:-1])
    grid, shape = _softmaxes(logits)
    _launch(_choose, grid, [action, log_prob], logits, noise, action, log_prob, log_prob.numel(), *shape)
    return action, log_prob


def log_prob_and_entropy(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Of one categorical, unmasked: logits [..., A], action int64 [...] -> log pi(a) and the entropy [...]."""
    return _LogProbAndEntropy.apply(logits, action)


class _LogProbAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        assert logits.shape[:-1] == action.shape, "log_prob_and_entropy wants an action for each row of logits"
        logits, action = logits.contiguous(), action.contiguous()
        log_prob, entropy = logits.new_empty(action.shape), logits.new_empty(action.shape)
        grid, shape = _softmaxes(logits)
        out = log_prob, entropy
        _launch(_log_prob_and_entropy, grid, out, logits, action, *out, action.numel(), *shape)
        ctx.save_for_backward(logits, action)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None]:
        logits, action = ctx.saved_tensors
        grad, grads = torch.empty_like(logits), (grad_log_prob.contiguous(), grad_entropy.contiguous())
        grid, shape = _softmaxes(logits)
        _launch(_log_prob_and_entropy_backward, grid, [grad], logits, action, *grads, grad, action.numel(), *shape)
        return grad, None


def _softmaxes(logits: Tensor) -> tuple[tuple[int], tuple[int, int, int]]:
    """The grid, and the constants that follow `count`: A, A padded, and rows a program."""
    a = logits.shape[-1]
    pad = 1 << (a - 1).bit_length()
    rows = max(1, LOGITS // pad)
    return (-(-logits[..., 0].numel() // rows),), (a, pad, rows)


@_jit
def _log_softmax(logits, count, A: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr):
    """A tile of logits and log-probabilities [TILE, PAD], minus infinity in the padding; offsets and masks of both shapes."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    a = tl.arange(0, PAD)[None, :]
    at, there = row[:, None] * A + a, (row < count)[:, None] & (a < A)
    x = tl.load(logits + at, mask=there, other=0.0)
    x = tl.where(a < A, x, -float("inf"))
    shifted = x - tl.max(x, 1)[:, None]
    return x, shifted - tl.log(tl.sum(tl.exp(shifted), 1))[:, None], a, at, there, row


@_jit
def _choose(
    logits, noise, action, log_prob, count, A: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    x, log, a, at, there, row = _log_softmax(logits, count, A, PAD, TILE)
    u = tl.load(noise + at, mask=there, other=0.5)
    u = tl.minimum(tl.maximum(u, 2.0**-24), 1 - 2.0**-24)
    best = tl.argmax(x - tl.log(-tl.log(u)), 1)
    best = tl.minimum(best, A - 1)  # whatever the logits are, the action exists
    tl.store(action + row, best.to(tl.int64), mask=row < count)
    tl.store(log_prob + row, tl.sum(tl.where(a == best[:, None], log, 0.0), 1), mask=row < count)


@_jit
def _log_prob_and_entropy(logits, action, log_prob, entropy, count, A: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr):
    _, log, a, _, there, row = _log_softmax(logits, count, A, PAD, TILE)
    chosen = tl.load(action + row, mask=row < count, other=0)
    tl.store(log_prob + row, tl.sum(tl.where(a == chosen[:, None], log, 0.0), 1), mask=row < count)
    tl.store(entropy + row, -tl.sum(tl.where(there, tl.exp(log) * log, 0.0), 1), mask=row < count)


@_jit
def _log_prob_and_entropy_backward(
    logits, action, grad_log_prob, grad_entropy, grad, count, A: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr
):
    """d log pi(a) = 1[a] - p, and dH = -p (log p + H)."""
    _, log, a, at, there, row = _log_softmax(logits, count, A, PAD, TILE)
    chosen = tl.load(action + row, mask=row < count, other=0)
    by_log = tl.load(grad_log_prob + row, mask=row < count, other=0.0)[:, None]
    by_entropy = tl.load(grad_entropy + row, mask=row < count, other=0.0)[:, None]
    p = tl.exp(log)
    entropy = -tl.sum(tl.where(there, p * log, 0.0), 1)[:, None]
    g = by_log * ((a == chosen[:, None]).to(tl.float32) - p) - by_entropy * p * (log + entropy)
    tl.store(grad + at, g, mask=there)


# --- advantages ---


def gae(
    reward: Tensor, value_t: Tensor, value_tp1: Tensor, terminated: Tensor, cut: Tensor, gamma: float, lam: float
) -> Tensor:
    """ops/returns.gae without turns; everything [T, B, N]. `cut` may be expanded along agents."""
    shape = reward.shape
    assert value_t.shape == value_tp1.shape == terminated.shape == cut.shape == shape, "gae wants everything [T, B, N]"
    assert reward.numel() < 2**31, "gae counts in 32 bits"
    values = [x.contiguous() for x in (reward, value_t, value_tp1, terminated)]
    advantage = torch.empty_like(values[0])
    lanes = shape[1] * shape[2]
    numbers = gamma, gamma * lam, shape[0], lanes, *cut.stride(), shape[2], LANES, AHEAD
    grid, warps = (-(-lanes // LANES),), max(1, LANES // 32)
    _launch(_gae, grid, [advantage], *values, cut, advantage, *numbers, num_warps=warps)
    return advantage


@_jit
def _gae(
    reward, value_t, value_tp1, terminated, cut, advantage, gamma, trace, steps, count, cut_t, cut_b, cut_n,
    N: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Each lane is an agent of a row and walks back in time. Some steps are read at once, so that they wait together."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    cut += lane // N * cut_b + lane % N * cut_n
    later = tl.zeros((LANES,), tl.float32)
    for end in range(steps, 0, -AHEAD):
        deltas, ends = (), ()
        for k in tl.static_range(AHEAD):
            t = end - 1 - k
            at, there = t * count + lane, (lane < count) & (t >= 0)
            done = tl.load(terminated + at, mask=there, other=1) != 0
            next_value = tl.where(done, 0.0, tl.load(value_tp1 + at, mask=there, other=0.0))
            r, v = tl.load(reward + at, mask=there, other=0.0), tl.load(value_t + at, mask=there, other=0.0)
            deltas = deltas + (r + gamma * next_value - v,)
            ends = ends + (done | (tl.load(cut + t * cut_t, mask=there, other=1) != 0),)
        for k in tl.static_range(AHEAD):
            t = end - 1 - k
            later = deltas[k] + tl.where(ends[k], 0.0, trace) * later
            tl.store(advantage + t * count + lane, later, mask=(lane < count) & (t >= 0))
