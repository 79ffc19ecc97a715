"""Exploration: noise that policies act by."""

from __future__ import annotations

import torch
from torch import Tensor

EDGE = 1e-7  # uniform numbers are kept so far from 0 and 1


def correlated(noise: Tensor, before: Tensor, start: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """Uniform numbers that remember: z_t = keep z_{t-1} + sqrt(1 - keep^2) xi_t, xi normal, of which the uniform ones are made
    again. Each is distributed as before, so densities stay what they are, but neighbours in time are alike and exploration
    goes somewhere: an Ornstein-Uhlenbeck process. noise, before [..., N, D], start [..., N] where it begins; returns z too."""
    fresh = torch.special.ndtri(noise.clamp(EDGE, 1 - EDGE))
    z = torch.where(start[..., None], fresh, keep * before + (1 - keep**2) ** 0.5 * fresh)
    return torch.special.ndtr(z), z
