"""Losses, element by element: masks and means are the caller's. `ppo` and `value` sum them up.

With `--compile fused`, the default where it can be had, `kernels/native.c` does `ppo` and `value` on a CPU; who changes
one of these equations changes it there as well, or trains with `--compile graph`. `tests/kernels/test_native.py` compares them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.ops.kernels import find


def ppo_clip(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip: float | Tensor) -> tuple[Tensor, Tensor]:
    """-min(rho A, clip(rho, 1 - eps, 1 + eps) A) with rho = pi / pi_old (https://arxiv.org/abs/1707.06347), and rho."""
    ratio = (log_prob - old_log_prob).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage), ratio  # type: ignore[arg-type]


def value_error(value: Tensor, target: Tensor, huber: float | None = None) -> Tensor:
    """Half the squared error; beyond `huber`, linear in it."""
    if huber is None:
        return 0.5 * (value - target).square()
    return torch.nn.functional.huber_loss(value, target.expand_as(value), reduction="none", delta=huber)


def value_clip(value: Tensor, old_value: Tensor, target: Tensor, clip: float, huber: float | None = None) -> Tensor:
    """The worse of the value's error and that of the value held within `clip` of the old one."""
    held = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(value_error(value, target, huber), value_error(held, target, huber))


def approximate_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """(rho - 1) - log rho, never negative, whose mean under the old policy is KL(old || new) (Schulman's k3)."""
    log_ratio = log_prob - old_log_prob
    return log_ratio.expm1() - log_ratio


def ppo(
    log_prob: Tensor,
    entropy: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor | None,
    clip: float | Tensor,
    weight: float | Tensor,
    kernels: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the policy descends, the sum of clipped losses less `weight` times the entropy; and means of what it is made of."""
    names = ("policy_loss", "entropy", "kl", "clip_fraction")
    if kernels and (kernel := find("ppo", log_prob.device)) is not None:
        total, means = kernel(log_prob, entropy, old_log_prob, advantage, mask, float(clip), float(weight))
        return total, dict(zip(names, means.unbind(), strict=True))
    loss, ratio = ppo_clip(log_prob, old_log_prob, advantage, clip)
    total = masked_sum(loss - weight * entropy, mask)
    with torch.no_grad():
        clipped = ((ratio - 1).abs() > clip).float()
        each = (loss, entropy, approximate_kl(log_prob, old_log_prob), clipped)
        return total, {name: masked_mean(x, mask) for name, x in zip(names, each, strict=True)}


def a2c(
    log_prob: Tensor, entropy: Tensor, advantage: Tensor, mask: Tensor | None, weight: float | Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the policy descends, the sum of -A log pi less `weight` times the entropy; and means of what it is made of."""
    loss = -log_prob * advantage
    means = {"policy_loss": masked_mean(loss.detach(), mask), "entropy": masked_mean(entropy.detach(), mask)}
    return masked_sum(loss - weight * entropy, mask), means


def value(
    value: Tensor,
    old_value: Tensor,
    target: Tensor,
    mask: Tensor | None,
    clip: float | None,
    huber: float | None,
    kernels: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the critic descends, the sum of errors; and their mean. Without `clip` the old value does not matter."""
    if kernels and (kernel := find("value_loss", value.device)) is not None:
        total, mean = kernel(value, None if clip is None else old_value, target, mask, clip or 0.0, huber)
        return total, {"value_loss": mean[0]}
    error = value_error(value, target, huber) if clip is None else value_clip(value, old_value, target, clip, huber)
    return masked_sum(error, mask), {"value_loss": masked_mean(error.detach(), mask)}


def explained_variance(value: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """1 - Var(target - value) / Var(target): one is perfect, zero no better than the mean."""
    error, spread = (masked_mean((x - masked_mean(x, mask)).square(), mask) for x in (target - value, target))
    return 1 - error / spread.clamp(min=1e-8)


def active_count(x: Tensor, mask: Tensor | None) -> Any:
    """How many samples are active."""
    return x.numel() if mask is None else mask.sum()


def masked_sum(x: Tensor, mask: Tensor | None) -> Tensor:
    return x.sum() if mask is None else torch.where(mask, x, 0).sum()


def masked_mean(x: Tensor, mask: Tensor | None, dim: tuple[int, ...] | None = None) -> Tensor:
    """Over `dim`, which are kept, or over everything."""
    keep = dim is not None
    if mask is None:
        return x.mean(dim, keep)
    return torch.where(mask, x, 0).sum(dim, keep) / mask.sum(dim, keep).clamp(min=1)


def weighted_means(each: list[dict[str, Tensor]], counts: list[Any]) -> dict[str, Tensor]:
    """Of numbers that are means of so many samples each, those of all samples: a part without any adds nothing."""
    total = sum(counts)
    total = total.clamp(min=1) if isinstance(total, Tensor) else total
    shares = [n / total for n in counts]
    return {k: torch.stack([x[k] * share for x, share in zip(each, shares, strict=True)]).sum() for k in each[0]}


def normalise(x: Tensor, mask: Tensor | None, dim: tuple[int, ...] | None = None, eps: float = 1e-8) -> Tensor:
    """Mean zero and standard deviation one over the active elements, of all or along `dim`; the rest becomes zero."""
    mean = masked_mean(x, mask, dim)
    std = masked_mean((x - mean).square(), mask, dim).sqrt()
    out = (x - mean) / (std + eps)
    return out if mask is None else torch.where(mask, out, 0)
