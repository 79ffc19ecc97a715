"""Noise that remembers: uniform still, alike in neighbours, fresh where an episode starts."""

from __future__ import annotations

import pytest
import torch

from shoal.ops.explore import correlated


def walk(keep: float, steps: int = 400, many: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """[steps, many, 1, 1] of one process each, uniform and normal; all begin at the first step."""
    g = torch.Generator().manual_seed(0)
    z, out, normal = torch.full((many, 1, 1), 99.0), [], []  # what was before does not matter where it starts
    for t in range(steps):
        u, z = correlated(torch.rand(many, 1, 1, generator=g), z, torch.full((many, 1), t == 0), keep)
        out.append(u)
        normal.append(z)
    return torch.stack(out), torch.stack(normal)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_each_is_uniform_and_neighbours_are_alike(keep: float) -> None:
    u, z = walk(keep)
    assert float(u.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(u.var()) == pytest.approx(1 / 12, abs=0.002)
    share = torch.histc(u, 10, 0, 1) / u.numel()
    assert share.tolist() == pytest.approx([0.1] * 10, abs=0.01)
    for t in (0, 1, 399):  # at every age alike: neither narrow at first nor ever wider
        assert float(z[t].var()) == pytest.approx(1, abs=0.15)
    for apart in (1, 3):
        ahead, behind = z[apart:].flatten(), z[:-apart].flatten()
        assert float(torch.corrcoef(torch.stack([ahead, behind]))[0, 1]) == pytest.approx(keep**apart, abs=0.02)


def test_by_hand() -> None:
    """ndtri(0.841345) = 1 and ndtri(0.5) = 0; 0.6 * 2 + 0.8 * 1 = 2, and ndtr(2) = 0.977250."""
    noise = torch.tensor([[[0.8413447, 0.5], [0.8413447, 0.5]]])  # [1, N = 2, D = 2]
    u, z = correlated(noise, torch.full((1, 2, 2), 2.0), torch.tensor([[False, True]]), 0.6)
    assert z.flatten().tolist() == pytest.approx([2.0, 1.2, 1.0, 0.0], abs=1e-5)
    assert u.flatten().tolist() == pytest.approx([0.9772499, 0.8849303, 0.8413447, 0.5], abs=1e-5)


def test_without_memory_the_noise_comes_back() -> None:
    noise = torch.rand(50, 3, 2, generator=torch.Generator().manual_seed(1))
    u, _ = correlated(noise, torch.full((50, 3, 2), 5.0), torch.zeros(50, 3, dtype=torch.bool), 0.0)
    assert torch.allclose(u, noise, atol=1e-6)


def test_the_edges_stay_finite() -> None:
    u, z = correlated(torch.tensor([[[0.0, 1.0]]]), torch.zeros(1, 1, 2), torch.tensor([[True]]), 0.9)
    assert z.isfinite().all()
    assert 0 < float(u.min()) < 1e-6
    assert 1 - 1e-6 < float(u.max()) <= 1
