"""Perceptrons against the plain ones that they stand for."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.nets import layers
from shoal.nets.config import NetConfig
from shoal.nets.layers import ACTIVATIONS, MLP, affine
from shoal.spec import UserError

torch.set_num_threads(1)
NAMES = ("agent_0", "agent_1", "agent_2")
MAPPED = "agent_0=a,agent_1=b,agent_2=a"


def mlp(share: str, n: int = 3, seed: int = 0, gain: Any = 1.0, hidden: tuple[int, ...] = (8, 6), **more: Any) -> MLP:
    last = more.pop("last", False)
    net = NetConfig(hidden=hidden, share=share, **more)
    out = MLP(4, 2, NAMES if n == 3 else n, net, torch.Generator().manual_seed(seed), gain, last=last)
    with torch.no_grad():  # biases begin at zero: give them something to get wrong
        for b in out.biases:
            b.add_(torch.randn(b.shape, generator=torch.Generator().manual_seed(seed + 1)))
    return out


def inputs(*lead: int) -> Tensor:
    return torch.randn(*lead, 4, generator=torch.Generator().manual_seed(9))


def by_hand(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str = "tanh", scales: tuple[Tensor, ...] = ()
) -> Tensor:
    """x [..., in]; weights [out, in]; scales [2, out] by which hidden layers are normalised."""
    for k, (w, b) in enumerate(zip(weights, biases, strict=True)):
        x = x @ w.T + b
        if k < len(scales):
            x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
            x = x * scales[k][0] + scales[k][1]
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
        net = MLP(4, 2, 3, NetConfig((8,), share=share), torch.Generator().manual_seed(0))
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


def test_the_output_may_be_activated_as_well() -> None:
    for share in ("id", "none", MAPPED):
        plain, last, x = mlp(share), mlp(share, last=True), inputs(5, 3)
        torch.testing.assert_close(last(x), torch.tanh(plain(x)))
    one = affine(4, 2, 3, NetConfig((8, 6), activation="relu", layer_norm=True), torch.Generator().manual_seed(0), last=True)
    assert len(one.weights) == 1
    assert one.ids is None
    assert len(one.scales) == 0
    torch.testing.assert_close(one(inputs(5, 3)), torch.relu(inputs(5, 3) @ one.weights[0].T))


def test_a_gain_for_so_many_outputs_in_turn() -> None:
    gain = ((0.5, 3), (2.0, 1))
    net = MLP(4, 4, 3, NetConfig((8,)), torch.Generator().manual_seed(0), gain)
    last = net.weights[-1]  # [4, 8]
    torch.testing.assert_close(last[:3] @ last[:3].T, 0.25 * torch.eye(3), rtol=0, atol=1e-6)
    assert last[3].norm().item() == pytest.approx(2.0)
    torch.testing.assert_close(net.weights[0].T @ net.weights[0], (5 / 3) ** 2 * torch.eye(4), rtol=0, atol=1e-5)
    own = MLP(4, 4, 3, NetConfig((8,), share="none"), torch.Generator().manual_seed(0), gain).weights[-1]  # [3, 8, 4]
    assert own.norm(dim=1).tolist() == [pytest.approx([0.5, 0.5, 0.5, 2.0])] * 3


def test_the_hidden_gain_may_be_given() -> None:
    net = MLP(4, 2, 3, NetConfig((8, 6), gain=0.5, share="plain"), torch.Generator().manual_seed(0), gain=3.0)
    first, second, last = net.weights  # [8, 4], [6, 8], [2, 6]
    assert first.norm(dim=0).tolist() == pytest.approx([0.5] * 4)
    assert second.norm(dim=1).tolist() == pytest.approx([0.5] * 6)
    assert last.norm(dim=1).tolist() == pytest.approx([3.0] * 2)


# --- layer normalisation ---


def test_layer_norm_in_numbers() -> None:
    """What comes in, 1 and 3, has mean 2 and deviation 1: -1 and 1; times 2 plus 1/2: -1.5 and 2.5; relu: 0 and 2.5."""
    net = MLP(2, 1, 1, NetConfig((2,), activation="relu", layer_norm=True), torch.Generator().manual_seed(0))
    (scale,) = net.scales  # [2, 1, 2]
    assert scale.tolist() == [[[1.0, 1.0]], [[0.0, 0.0]]]
    with torch.no_grad():
        net.weights[0].copy_(torch.eye(2))
        net.weights[1].copy_(torch.tensor([[3.0, 4.0]]))
        scale[0], scale[1] = 2.0, 0.5
    assert net(torch.tensor([[1.0, 3.0]])).item() == pytest.approx(3 * 0 + 4 * 2.5, abs=1e-4)
    assert net(torch.tensor([[10.0, 30.0]])).item() == pytest.approx(10.0, abs=1e-4)  # whatever the scale of what comes in
    assert net(torch.tensor([[3.0, 1.0]])).item() == pytest.approx(3 * 2.5, abs=1e-4)


@pytest.mark.parametrize(
    ("share", "owners"), [("id", [0, 0, 0]), ("plain", [0, 0, 0]), ("none", [0, 1, 2]), (MAPPED, [0, 1, 0])]
)
def test_layer_norm_has_a_scale_and_a_shift_for_each_set_of_weights(share: str, owners: list[int]) -> None:
    net, x = mlp(share, layer_norm=True), inputs(5, 7, 3)
    sets = max(owners) + 1
    assert [tuple(s.shape) for s in net.scales] == [(2, sets, 8), (2, sets, 6)]  # not of the output
    with torch.no_grad():
        for s in net.scales:
            s.add_(torch.randn(s.shape, generator=torch.Generator().manual_seed(3)))
    out = net(x)
    for i, owner in enumerate(owners):
        weights = [w if sets == 1 else w[owner].T for w in net.weights]
        biases = [b if sets == 1 else b[owner, 0] for b in net.biases]
        biases[0] = biases[0] if net.ids is None else biases[0] + net.ids[i]
        scales = tuple(s[:, owner] for s in net.scales)
        torch.testing.assert_close(out[..., i, :], by_hand(x[..., i, :], weights, biases, "tanh", scales), rtol=1e-4, atol=1e-5)
    assert len(mlp(share, layer_norm=True, last=True).scales) == 3


# --- sets of weights by name ---


def test_owners() -> None:
    assert NetConfig(share=MAPPED).owners(NAMES) == (0, 1, 0)
    assert NetConfig(share="agent_2=a, agent_1=b, agent_0=b").owners(NAMES) == (0, 0, 1)  # in the order of the agents
    assert NetConfig(share="agent_0=x,agent_1=x,agent_2=x").owners(NAMES) == (0, 0, 0)
    assert NetConfig(share="agent_0=x,agent_1=y,agent_2=z").owners(NAMES) == (0, 1, 2)
    assert NetConfig(share="none").owners(3) == NetConfig(share="none").owners(NAMES) == (0, 1, 2)
    assert NetConfig(share="id").owners(3) == NetConfig(share="plain").owners(NAMES) == (0, 0, 0)


@pytest.mark.parametrize(
    ("share", "owners"),
    [(MAPPED, [0, 1, 0]), ("agent_0=a,agent_1=b,agent_2=c", [0, 1, 2]), ("agent_0=a,agent_1=a,agent_2=a", [0, 0, 0])],
)
def test_sets_by_name_are_separate_nets_with_ids(share: str, owners: list[int]) -> None:
    net, x, sets = mlp(share), inputs(5, 7, 3), max(owners) + 1
    assert net.weights[1].shape == ((6, 8) if sets == 1 else (sets, 8, 6))
    assert net.ids.shape == (3, 8)
    out = net(x)
    assert out.shape == (5, 7, 3, 2)
    for i, owner in enumerate(owners):
        weights = [w if sets == 1 else w[owner].T for w in net.weights]
        biases = [b if sets == 1 else b[owner, 0] for b in net.biases]
        joined = torch.cat((weights[0], net.ids.T), 1)  # [8, 4 + 3]: the id is an input like others
        wide = torch.cat((x[..., i, :], torch.eye(3)[i].expand(5, 7, 3)), -1)
        torch.testing.assert_close(out[..., i, :], by_hand(wide, [joined, *weights[1:]], biases))
        mine = torch.cat((weights[0], net.ids[[k for k in range(3) if owners[k] == owner]].T), 1)
        torch.testing.assert_close(mine.T @ mine, (5 / 3) ** 2 * torch.eye(mine.shape[1]), rtol=0, atol=1e-5)


def test_agents_of_one_set_differ_by_their_ids_alone() -> None:
    net, x = mlp(MAPPED), inputs(5, 1).expand(5, 3, 4)
    out = net(x)
    assert not torch.allclose(out[:, 0], out[:, 2])
    with torch.no_grad():
        net.ids.zero_()
    out = net(x)
    torch.testing.assert_close(out[:, 0], out[:, 2], rtol=0, atol=1e-6)
    assert not torch.allclose(out[:, 0], out[:, 1])


def test_gradients_of_a_shared_set_add_up() -> None:
    """One layer: the gradient of the sum of all outputs, by a weight, is the sum of what came in."""
    net = mlp(MAPPED, hidden=())
    x = torch.arange(2 * 3 * 4.0).reshape(
        2, 3, 4
    )  # rows of agent 0: 0.. and 12..; agent 1: 4.. and 16..; agent 2: 8.. and 20..
    net(x).sum().backward()
    weight, bias = net.weights[0].grad, net.biases[0].grad
    assert weight is not None
    assert bias is not None
    assert net.ids.grad is not None
    assert weight[0].tolist() == [[40.0, 40], [44, 44], [48, 48], [52, 52]]  # 0 + 12 + 8 + 20, then one more of each
    assert weight[1].tolist() == [[20.0, 20], [22, 22], [24, 24], [26, 26]]  # 4 + 16
    assert bias[:, 0].tolist() == [[4.0, 4.0], [2.0, 2.0]]  # two rows times two agents, and times one
    assert net.ids.grad.tolist() == [[2.0, 2.0]] * 3


WRONG = {
    "agent_0=a,agent_3=b": "--net.share names 'agent_3' (did you mean 'agent_2' or 'agent_1'?), who is not here: "
    "there are agent_0, agent_1, agent_2.",
    "agent_0=a,agent_2=b": "--net.share says nothing of agent_1: it must name a set for every agent.",
    "agent_0=a": "--net.share says nothing of agent_1, agent_2: it must name a set for every agent.",
    "agent_0=a,agent_1=,agent_2=b": "--net.share says nothing of agent_1: it must name a set for every agent.",
    "plane": "--net.share is 'plane' (did you mean 'plain'?): it takes id, plain, none, or sets of weights by name: "
    "agent_0=a,agent_1=b.",
    "everything": "--net.share is 'everything': it takes id, plain, none, or sets of weights by name: agent_0=a,agent_1=b.",
}


@pytest.mark.parametrize("share", WRONG)
def test_shares_that_will_not_do(share: str) -> None:
    with pytest.raises(UserError) as e:
        NetConfig(share=share).owners(NAMES)
    assert str(e.value) == WRONG[share]


# --- precision ---


@pytest.mark.parametrize("more", [{}, {"layer_norm": True}, {"activation": "relu"}])
@pytest.mark.parametrize("share", ["id", "plain", "none", MAPPED])
def test_products_in_bfloat16_leave_everything_else_float32(share: str, more: dict[str, Any]) -> None:
    full, half, x = mlp(share, gain=0.2, **more), mlp(share, gain=0.2, precision="bf16", **more), inputs(64, 3)
    assert all(torch.equal(p, q) for p, q in zip(full.parameters(), half.parameters(), strict=True))
    out, gap = half(x), (half(x) - full(x)).abs().max().item()
    assert out.dtype == torch.float32
    assert 0 < gap < 1e-2
    out.square().sum().backward()
    full(x).square().sum().backward()
    for p, q in zip(half.parameters(), full.parameters(), strict=True):
        assert p.dtype == torch.float32
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.dtype == torch.float32
        assert (p.grad - q.grad).norm() < 0.05 * q.grad.norm()


# --- one kernel each way ---


def test_only_nets_that_a_kernel_can_do_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "for_device", lambda device: SimpleNamespace(mlp_fits=lambda *shape: True))
    plain = [mlp("id"), mlp("plain"), mlp("none"), mlp("agent_0=a,agent_1=a,agent_2=a")]
    other = [mlp("id", layer_norm=True), mlp("none", precision="bf16"), mlp(MAPPED), mlp("id", last=True)]
    other.append(mlp("agent_0=a,agent_1=b,agent_2=c"))  # sets and ids both
    other.append(MLP(4, 2, NAMES, NetConfig((8,), share=MAPPED), torch.Generator().manual_seed(0), ids=False))
    for net in (*plain, *other):
        net.use_kernels()
    assert [net.fused for net in plain] == [True] * 4
    assert [net.fused for net in other] == [False] * 6
