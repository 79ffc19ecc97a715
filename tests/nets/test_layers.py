"""Perceptrons against the plain ones that they stand for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.nets.layers import ACTIVATIONS, MLP, NetConfig
from shoal.spec import UserError

torch.set_num_threads(1)


def mlp(share: str, n: int = 3, seed: int = 0, gain: float = 1.0, hidden: tuple[int, ...] = (8, 6), **more: str) -> MLP:
    net = NetConfig(hidden=hidden, share=share, **more)  # type: ignore[arg-type]
    out = MLP(4, 2, n, net, torch.Generator().manual_seed(seed), gain)
    with torch.no_grad():  # biases begin at zero: give them something to get wrong
        for b in out.biases:
            b.add_(torch.randn(b.shape, generator=torch.Generator().manual_seed(seed + 1)))
    return out


def inputs(*lead: int) -> Tensor:
    return torch.randn(*lead, 4, generator=torch.Generator().manual_seed(9))


def by_hand(x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str = "tanh") -> Tensor:
    """x [..., in]; weights [out, in]."""
    for k, (w, b) in enumerate(zip(weights, biases, strict=True)):
        x = x @ w.T + b
        x = ACTIVATIONS[activation](x) if k < len(weights) - 1 else x
    return x


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_own_weights_are_a_loop_over_separate_nets(activation: str) -> None:
    net, x = mlp("none", activation=activation), inputs(5, 7, 3)
    out = net(x)
    assert out.shape == (5, 7, 3, 2)
    for i in range(3):
        weights, biases = [w[i].T for w in net.weights], [b[i, 0] for b in net.biases]
        torch.testing.assert_close(out[..., i, :], by_hand(x[..., i, :], weights, biases, activation))
    assert not torch.allclose(net(x[..., :1, :].expand_as(x))[..., 0, :], net(x[..., :1, :].expand_as(x))[..., 1, :])


def test_own_weights_get_own_gradients() -> None:
    net = mlp("none")
    net(inputs(6, 3))[:, 1].sum().backward()
    for p in net.parameters():
        assert p.grad is not None
        assert p.grad[1].abs().sum() > 0
        assert p.grad[0].abs().sum() == 0
        assert p.grad[2].abs().sum() == 0


def test_ids_are_appended_one_hots() -> None:
    net, x = mlp("id"), inputs(5, 7, 3)
    joined = torch.cat((net.weights[0], net.ids.T), 1)  # [8, 4 + 3]
    assert joined.shape == (8, 7)
    wide = torch.cat((x, torch.eye(3).expand(5, 7, 3, 3)), -1)
    expected = by_hand(wide, [joined, *net.weights[1:]], list(net.biases))
    torch.testing.assert_close(net(x), expected)
    same = net(x[..., :1, :].expand_as(x))
    assert not torch.allclose(same[..., 0, :], same[..., 1, :])  # who sees the same may do otherwise


def test_a_single_agent_needs_no_id() -> None:
    net = mlp("id", n=1)
    assert net.ids is None
    assert net.weights[0].shape == (8, 4)


def test_plain_does_the_same_on_the_same() -> None:
    net = mlp("plain")
    x = inputs(5, 1).expand(5, 3, 4)
    out = net(x)
    assert torch.equal(out[:, 0], out[:, 1])
    assert torch.equal(out[:, 0], out[:, 2])
    torch.testing.assert_close(out, by_hand(x, list(net.weights), list(net.biases)))
    assert net.ids is None


@pytest.mark.parametrize(("activation", "gain"), [("tanh", 5 / 3), ("relu", math.sqrt(2)), ("gelu", math.sqrt(2))])
def test_orthogonal_with_the_gain(activation: str, gain: float) -> None:
    net = mlp("plain", gain=0.01, activation=activation)
    first, second, last = net.weights  # [8, 4], [6, 8], [2, 6]
    torch.testing.assert_close(first.T @ first, gain**2 * torch.eye(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(second @ second.T, gain**2 * torch.eye(6), rtol=0, atol=1e-5)
    torch.testing.assert_close(last @ last.T, 1e-4 * torch.eye(2), rtol=0, atol=1e-9)


def test_orthogonal_is_of_the_whole_first_matrix_and_of_each_agents() -> None:
    net = mlp("id")
    joined = torch.cat((net.weights[0], net.ids.T), 1)
    torch.testing.assert_close(joined.T @ joined, (5 / 3) ** 2 * torch.eye(7), rtol=0, atol=1e-5)
    own = mlp("none").weights[0]  # [3, 4, 8]
    for w in own:
        torch.testing.assert_close(w @ w.T, (5 / 3) ** 2 * torch.eye(4), rtol=0, atol=1e-5)
    assert not torch.allclose(own[0], own[1])


def test_xavier_bounds() -> None:
    net = MLP(40, 30, 1, NetConfig((50,), init="xavier"), torch.Generator().manual_seed(0), gain=0.5)
    for w, gain, total in zip(net.weights, (5 / 3, 0.5), (90, 80), strict=True):
        bound = gain * math.sqrt(6 / total)
        assert 0.97 * bound < w.abs().max().item() <= bound * (1 + 1e-6)
        assert w.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_biases_begin_at_zero() -> None:
    for share in ("id", "plain", "none"):
        net = MLP(4, 2, 3, NetConfig((8,), share=share), torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        assert all(b.abs().sum() == 0 for b in net.biases)


@pytest.mark.parametrize("init", ["orthogonal", "xavier"])
@pytest.mark.parametrize("share", ["id", "plain", "none"])
def test_first_weights_follow_the_generator_alone(share: str, init: str) -> None:
    before = torch.random.get_rng_state()
    one, two, other = (mlp(share, seed=s, init=init) for s in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    pairs = list(zip(one.parameters(), two.parameters(), other.parameters(), strict=True))
    assert len(pairs) == (7 if share == "id" else 6)
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs)


def test_no_hidden_layers() -> None:
    net, x = mlp("id", hidden=()), inputs(5, 3)
    torch.testing.assert_close(net(x), x @ net.weights[0].T + net.biases[0] + net.ids)
    own = mlp("none", hidden=())
    assert own(x).shape == (5, 3, 2)

    with pytest.raises(UserError, match=r"--net.hidden is 8,0: a layer needs at least one unit\."):
        NetConfig(hidden=(8, 0))
