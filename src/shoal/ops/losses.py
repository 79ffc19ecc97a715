"""Losses, element by element: masks and means are the caller's. `ppo` and `value` sum them up.

With `--compile fused`, the default where it can be had, `kernels/native.c` does `ppo` and `value` on a CPU; who changes
one of these equations changes it there as well, or trains with `--compile graph`. `tests/kernels/test_native.py` compares them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.ops.kernels import find

EACH = "/each"  # behind the name of a metric: of each agent the sum, and over how many, [2, N]


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
    agents: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the policy descends, the sum of clipped losses less `weight` times the entropy; and `means` of its parts."""

    @torch.no_grad()
    def parts(loss: Tensor, ratio: Tensor) -> dict[str, Tensor]:
        clipped = ((ratio - 1).abs() > clip).float()
        kl = approximate_kl(log_prob, old_log_prob)
        return {"policy_loss": loss, "entropy": entropy, "kl": kl, "clip_fraction": clipped}

    if kernels and (kernel := find("ppo", log_prob.device)) is not None:
        total, found = kernel(log_prob, entropy, old_log_prob, advantage, mask, float(clip), float(weight))
        metrics = dict(zip(("policy_loss", "entropy", "kl", "clip_fraction"), found.unbind(), strict=True))
        if agents is not None:
            metrics |= agent_sums(parts(*ppo_clip(log_prob, old_log_prob, advantage, clip)), mask, agents)
        return total, metrics
    loss, ratio = ppo_clip(log_prob, old_log_prob, advantage, clip)
    total = masked_sum(loss - weight * entropy, mask)
    return total, means(parts(loss, ratio), mask, agents)


def a2c(
    log_prob: Tensor,
    entropy: Tensor,
    advantage: Tensor,
    mask: Tensor | None,
    weight: float | Tensor,
    agents: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the policy descends, the sum of -A log pi less `weight` times the entropy; and `means` of its parts."""
    loss = -log_prob * advantage
    return masked_sum(loss - weight * entropy, mask), means({"policy_loss": loss, "entropy": entropy}, mask, agents)


def value(
    value: Tensor,
    old_value: Tensor,
    target: Tensor,
    mask: Tensor | None,
    clip: float | None,
    huber: float | None,
    kernels: bool = False,
    agents: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the critic descends, the sum of errors; and their `means`. Without `clip` the old value does not matter."""

    def errors() -> Tensor:
        return value_error(value, target, huber) if clip is None else value_clip(value, old_value, target, clip, huber)

    if kernels and (kernel := find("value_loss", value.device)) is not None:
        total, mean = kernel(value, None if clip is None else old_value, target, mask, clip or 0.0, huber)
        apart = {} if agents is None else agent_sums({"value_loss": errors()}, mask, agents)
        return total, {"value_loss": mean[0], **apart}
    error = errors()
    return masked_sum(error, mask), means({"value_loss": error}, mask, agents)


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


@torch.no_grad()
def means(each: dict[str, Tensor], mask: Tensor | None, agents: int | None = None) -> dict[str, Tensor]:
    """What is logged of them: each one's mean over who is active; and where metrics of so many `agents` are asked for, what
    those take (`agent_sums`)."""
    out = {name: masked_mean(x, mask) for name, x in each.items()}
    return out if agents is None else {**out, **agent_sums(each, mask, agents)}


@torch.no_grad()
def agent_sums(each: dict[str, Tensor], mask: Tensor | None, agents: int) -> dict[str, Tensor]:
    """Of those that are [..., N], of so many agents: each agent's sum over where it is active, and over how many, [2, N]."""
    out = {}
    for name, x in each.items():
        if x.shape[-1] == agents:
            kept, count = (x, torch.ones_like(x)) if mask is None else (torch.where(mask, x, 0), mask.to(x.dtype))
            out[name + EACH] = torch.stack((kept, count)).reshape(2, -1, agents).sum(1)
    return out


def mean_of_steps(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Means of metrics over the steps of an update; what is of each agent is added up."""
    whole = {k: torch.stack([s[k] for s in steps]) for k in steps[0]}
    return {k: x.sum(0) if k.endswith(EACH) else x.mean() for k, x in whole.items()}


def weighted_means(each: list[dict[str, Tensor]], counts: list[Any]) -> dict[str, Tensor]:
    """Of numbers that are means of so many samples each, those of all samples: a part without any adds nothing. What is of each
    agent is added up."""
    total = sum(counts)
    total = total.clamp(min=1) if isinstance(total, Tensor) else total
    shares = [n / total for n in counts]
    apart = {k: torch.stack([x[k] for x in each]).sum(0) for k in each[0] if k.endswith(EACH)}
    whole = [k for k in each[0] if k not in apart]
    return {k: torch.stack([x[k] * n for x, n in zip(each, shares, strict=True)]).sum() for k in whole} | apart


def normalise(x: Tensor, mask: Tensor | None, dim: tuple[int, ...] | None = None, eps: float = 1e-8) -> Tensor:
    """Mean zero and standard deviation one over the active elements, of all or along `dim`; the rest becomes zero."""
    mean = masked_mean(x, mask, dim)
    std = masked_mean((x - mean).square(), mask, dim).sqrt()
    out = (x - mean) / (std + eps)
    return out if mask is None else torch.where(mask, out, 0)
