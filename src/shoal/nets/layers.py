"""Multi-layer perceptrons over agents: one set of weights for all, or one for each agent in one batched product.

Input and output are [..., N, features]. `share` says what agents have in common:

    id     one set of weights; every agent's one-hot id is appended to the input
    plain  one set of weights, no id: agents that see the same do the same
    none   weights of their own
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.ops.kernels import for_device
from shoal.spec import UserError


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


@dataclass(frozen=True)
class NetConfig:
    hidden: tuple[int, ...] = (64, 64)  # widths of the hidden layers, of actor and critic
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = "tanh"  # between layers
    init: Literal["orthogonal", "xavier"] = "orthogonal"  # first weights
    share: Literal["id", "plain", "none"] = "id"  # agents of a group: one net with ids, one without, or a net each

    def __post_init__(self) -> None:
        if any(h < 1 for h in self.hidden):
            raise UserError(f"--net.hidden is {','.join(map(str, self.hidden))}: a layer needs at least one unit.")


class MLP(nn.Module):
    """[..., N, width_in] -> [..., N, width_out]."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        n: int,
        net: NetConfig,
        generator: torch.Generator,
        gain: float = 1.0,
    ):
        super().__init__()
        self.sets = n if net.share == "none" else 1
        self.net, self.width_in, self.width_out = net, width_in, width_out
        self.activation = ACTIVATIONS[net.activation]
        self.fused = False  # one kernel each way
        ids = n if net.share == "id" and n > 1 else 0
        widths = [width_in, *net.hidden, width_out]
        hidden_gain = math.sqrt(2) if net.activation != "tanh" else 5 / 3
        weights, biases = [], []
        for k, (a, b) in enumerate(pairwise(widths)):
            last = k == len(widths) - 2
            extra = ids if k == 0 else 0
            each = [_first(b, a + extra, gain if last else hidden_gain, net.init, generator) for _ in range(self.sets)]
            if extra:  # the one-hot id's columns: what they add is a bias for each agent
                self.ids = nn.Parameter(each[0][:, a:].T.contiguous())  # [N, b]
                each = [each[0][:, :a].contiguous()]
            weights.append(nn.Parameter(each[0] if self.sets == 1 else torch.stack([w.T for w in each])))
            biases.append(nn.Parameter(torch.zeros(b) if self.sets == 1 else torch.zeros(self.sets, 1, b)))
        if not ids:
            self.ids = None  # type: ignore[assignment]
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)

    def fuse(self) -> None:
        """Take one kernel each way, if there is one for these widths."""
        ids = 0 if self.ids is None else len(self.ids)
        widths, tf32 = (self.width_in, self.net.hidden, self.width_out), torch.backends.cuda.matmul.allow_tf32
        self.fused = for_device(self.weights[0].device).mlp_fits(*widths, ids, self.net.activation, tf32)
        self._parts = tuple(self.weights), tuple(self.biases)  # of which nn.ParameterList makes a long affair

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            tf32 = torch.backends.cuda.matmul.allow_tf32
            return for_device(x.device).mlp(x, *self._parts, self.ids, self.net.activation, tf32)
        layers = list(zip(self.weights, self.biases, strict=True))
        if self.sets == 1:
            for k, (w, b) in enumerate(layers):
                x = nn.functional.linear(x, w, b)
                if k == 0 and self.ids is not None:
                    x = x + self.ids
                if k < len(layers) - 1:
                    x = self.activation(x)
            return x
        lead = x.shape[:-2]
        x = x.reshape(-1, self.sets, x.shape[-1]).transpose(0, 1)  # [N, M, in]
        for k, (w, b) in enumerate(layers):
            x = torch.baddbmm(b, x, w)
            if k < len(layers) - 1:
                x = self.activation(x)
        return x.transpose(0, 1).reshape(*lead, self.sets, -1)


def _first(rows: int, columns: int, gain: float, init: str, generator: torch.Generator) -> Tensor:
    weight = torch.empty(rows, columns)
    if init == "orthogonal":
        return nn.init.orthogonal_(weight, gain, generator=generator)
    return nn.init.xavier_uniform_(weight, gain, generator=generator)
