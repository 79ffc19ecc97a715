"""Running normalisers: mean and variance of all that was seen, merged batch by batch; saved with the weights.

One of the user's own (`--algo.normaliser file.py:Class:clip=5,momentum=0.99`, read in `nets/own.py`) is an nn.Module with the
same three methods, made as Class(width, clip=5, momentum=0.99), or Class(clip=5, momentum=0.99) for single numbers:

    update(x, mask)      x [..., width], and which of the leading dimensions count, or none
    normalise(x, clip)   the same shape; held within the clip where there is one
    denormalise(x)       the other way, for values
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.ops.losses import masked_mean

CLIP = 10.0  # normalised observations are held within this


class Running(nn.Module):
    """Mean and variance over all dimensions but the last `len(shape)`. `tied`: numbers whose statistics are one.

    Batches are merged as Chan et al. (1979) do; the statistics are float64, for counts grow past what float32 adds up.
    """

    share: Tensor | None
    mean: Tensor
    var: Tensor
    count: Tensor
    shift: Tensor  # the mean, and
    scale: Tensor  # the deviation, as they are used: every step asks for them

    def __init__(self, *shape: int, tied: Sequence[Sequence[int]] = ()):
        super().__init__()
        share = torch.eye(*shape, *shape, dtype=torch.float64) if tied else None
        for places in tied:
            share[torch.tensor(places)[:, None], torch.tensor(places)] = 1 / len(places)  # type: ignore[index]
        self.register_buffer("share", share, persistent=False)
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """x [..., *shape]; mask over the leading dimensions: what is false is not counted."""
        shape = self.mean.shape
        x = x.reshape(-1, *shape).double()
        mask = None if mask is None else mask.reshape(-1, *(1,) * len(shape))
        n = torch.full_like(self.count, len(x)) if mask is None else mask.sum()
        mean = masked_mean(x, mask, (0,))[0]
        var = masked_mean((x - mean).square(), mask, (0,))[0]
        if self.share is not None:
            pooled = self.share @ mean
            mean, var = pooled, self.share @ (var + (mean - pooled).square())
        total, delta = self.count + n, mean - self.mean
        share = n / total.clamp(min=1)
        merged = self.var * (self.count / total.clamp(min=1)) + var * share + delta.square() * share * (1 - share)
        self.var.copy_(torch.where(total > 0, merged, self.var))
        self.mean.add_(delta * share)
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.var + 1e-8).sqrt().clamp(min=1e-4))

    def normalise(self, x: Tensor, clip: float | None = None) -> Tensor:
        out = (x - self.shift.to(x.dtype)) / self.scale.to(x.dtype)
        return out if clip is None else out.clamp(-clip, clip)

    def divide(self, x: Tensor) -> Tensor:
        """By the root mean square: rewards keep their signs."""
        return x / (self.var + self.mean.square()).sqrt().clamp(min=1e-4).to(x.dtype)

    def denormalise(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift.to(x.dtype), x, self.scale.to(x.dtype))
