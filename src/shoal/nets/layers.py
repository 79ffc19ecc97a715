"""Multi-layer perceptrons over agents: one set of weights for all, or several in one batched product.

Input and output are [..., N, features]. `share` says what agents have in common:

    id                              one set of weights; every agent's one-hot id is appended to the input
    plain                           one set of weights, no id: agents that see the same do the same
    none                            weights of their own
    agent_0=a,agent_1=a,agent_2=b   sets of weights by name, with ids: agents that name the same set share it

With `precision` bf16 products are taken in bfloat16; weights, what comes in and what goes out stay float32.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.nets.config import NetConfig
from shoal.ops.kernels import for_device


class _Tanh(torch.autograd.Function):
    """tanh x = 2 sigmoid(2 x) - 1. On the CPU PyTorch's sigmoid was measured six times faster than its tanh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(x * 2).mul_(2).sub_(1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grad, y)


def tanh(x: Tensor) -> Tensor:
    return _Tanh.apply(x) if x.device.type == "cpu" else x.tanh()


ACTIVATIONS = {
    "tanh": tanh,
    "relu": torch.relu,
    "elu": nn.functional.elu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
}


class MLP(nn.Module):
    """[..., N, width_in] -> [..., N, width_out]. `agents`: their number, or their names. `gain`: of the last layer's first
    weights, or (gain, outputs) for so many outputs in turn. `last`: the output is activated as well."""

    owners: Tensor | None

    def __init__(
        self,
        width_in: int,
        width_out: int,
        agents: tuple[str, ...] | int,
        net: NetConfig,
        generator: torch.Generator,
        gain: float | tuple[tuple[float, int], ...] = 1.0,
        ids: bool = True,
        last: bool = False,
    ):
        super().__init__()
        owners = net.owners(agents)
        self.sets, n = max(owners) + 1, len(owners)
        self.mapped = self.sets > 1 and self.sets < n
        self.net, self.width_in, self.width_out, self.last = net, width_in, width_out, last
        self.activation = ACTIVATIONS[net.activation]
        self.fused = False  # one kernel each way
        have_ids = n if ids and net.share not in ("plain", "none") and n > 1 else 0
        widths = [width_in, *net.hidden, width_out]
        weights, biases, scales = [], [], []
        for k, (a, b) in enumerate(pairwise(widths)):
            final = k == len(widths) - 2
            gains = gain if final else net.hidden_gain
            extra = have_ids if k == 0 else 0
            each = [_first(b, a + extra, gains, net.init, generator) for _ in range(self.sets)]
            if extra:  # the one-hot id's columns: what they add is a bias for each agent
                self.ids = nn.Parameter(torch.stack([each[owner][:, a + i] for i, owner in enumerate(owners)]))  # [N, b]
                each = [w[:, :a].contiguous() for w in each]
            weights.append(nn.Parameter(each[0] if self.sets == 1 else torch.stack([w.T for w in each])))
            biases.append(nn.Parameter(torch.zeros(b) if self.sets == 1 else torch.zeros(self.sets, 1, b)))
            if net.layer_norm and (last or not final):  # a scale and a shift
                scales.append(nn.Parameter(torch.stack((torch.ones(self.sets, b), torch.zeros(self.sets, b)))))
        if not have_ids:
            self.ids = None  # type: ignore[assignment]
        self.weights, self.biases, self.scales = map(nn.ParameterList, (weights, biases, scales))
        self.register_buffer("owners", torch.tensor(owners) if self.mapped else None, persistent=False)

    def use_kernels(self) -> None:
        """Take one kernel each way, if there is one for these widths."""
        by_name = self.sets > 1 and self.ids is not None
        if by_name or self.mapped or self.last or self.net.layer_norm or self.net.precision != "float32":
            return
        ids = 0 if self.ids is None else len(self.ids)
        widths, tf32 = (self.width_in, self.net.hidden, self.width_out), torch.backends.cuda.matmul.allow_tf32
        self.fused = for_device(self.weights[0].device).mlp_fits(*widths, ids, self.net.activation, tf32)
        self._parts = tuple(self.weights), tuple(self.biases)  # of which nn.ParameterList makes a long affair

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            tf32 = torch.backends.cuda.matmul.allow_tf32
            return for_device(x.device).mlp(x, *self._parts, self.ids, self.net.activation, tf32)
        lead, dtype = x.shape[:-1], x.dtype
        if self.sets > 1:
            x = x.reshape(-1, *x.shape[-2:]).transpose(0, 1)  # [N, M, in]
        last = len(self.weights) - 1
        for k, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = self._product(x, w, b)
            if k == 0 and self.ids is not None:
                x = x + (self.ids if self.sets == 1 else self.ids[:, None])
            if k < last or self.last:
                x = self.activation(x if not self.scales else self._normed(x, self.scales[k]))
        x = x if self.sets == 1 else x.transpose(0, 1).reshape(*lead, self.width_out)
        return x.to(dtype)

    def of_agent(self, i: int) -> dict[str, Tensor]:
        """Where each agent has weights of its own, those of one, as it would have them in a net for it alone."""
        out: dict[str, Tensor] = {}
        for k, (w, b) in enumerate(zip(self.weights, self.biases, strict=True) if self.apart else ()):
            out |= {f"weights.{k}": w[i].T, f"biases.{k}": b[i, 0]}
        return out | {f"scales.{k}": s[:, i : i + 1] for k, s in enumerate(self.scales if self.apart else ())}

    @property
    def apart(self) -> bool:
        """Whether agents share nothing."""
        return self.sets > 1 and self.net.share == "none"

    def _product(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if self.mapped:
            w, b = w[self.owners], b[self.owners]
        if self.net.precision == "bf16":
            x, w, b = x.bfloat16(), w.bfloat16(), b.bfloat16()
        return nn.functional.linear(x, w, b) if self.sets == 1 else torch.baddbmm(b, x, w)

    def _normed(self, x: Tensor, scale: Tensor) -> Tensor:
        """Layer normalisation, scale [2, sets, width]."""
        by, plus = scale[:, 0] if self.sets == 1 else scale[:, self.owners, None] if self.mapped else scale[:, :, None]
        return torch.addcmul(plus, nn.functional.layer_norm(x.float(), x.shape[-1:]), by)


def affine(
    width_in: int,
    width_out: int,
    agents: tuple[str, ...] | int,
    net: NetConfig,
    generator: torch.Generator,
    gain: float | tuple[tuple[float, int], ...] = 1.0,
    last: bool = False,
) -> MLP:
    """One layer, without ids."""
    bare = replace(net, hidden=(), layer_norm=False)
    return MLP(width_in, width_out, agents, bare, generator, gain, ids=False, last=last)


def _first(
    rows: int, columns: int, gain: float | tuple[tuple[float, int], ...], init: str, generator: torch.Generator
) -> Tensor:
    if isinstance(gain, tuple):
        return torch.cat([_first(n, columns, g, init, generator) for g, n in gain])
    weight = torch.empty(rows, columns)
    if init == "orthogonal":
        return nn.init.orthogonal_(weight, gain, generator=generator)
    return nn.init.xavier_uniform_(weight, gain, generator=generator)
