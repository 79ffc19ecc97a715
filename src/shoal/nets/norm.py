"""Running normalisers: mean and variance of all that was seen, merged batch by batch; saved with the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

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
        x = x.detach().reshape(-1, *shape).double()
        if mask is None:
            n = torch.full_like(self.count, x.shape[0])
            mean = x.mean(0)
            var = (x - mean).square().mean(0)
        else:
            weight = mask.reshape(-1, *(1,) * len(shape)).double()
            x = torch.where(weight > 0, x, 0)  # a masked NaN times zero would still be one
            n = weight.sum()
            mean = (x * weight).sum(0) / n.clamp(min=1)
            var = ((x - mean).square() * weight).sum(0) / n.clamp(min=1)
        if self.share is not None:
            pooled = self.share @ mean
            var = self.share @ (var + (mean - pooled).square())
            mean = pooled
        total = self.count + n
        delta = mean - self.mean
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

    def denormalise(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift.to(x.dtype), x, self.scale.to(x.dtype))
