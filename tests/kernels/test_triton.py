"""The fused kernels against PyTorch's own operations. On a GPU as they are; elsewhere with TRITON_INTERPRET=1 (and a NumPy
older than 2.4, which Triton 3.6's interpreter wants)."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import Tensor

from shoal.nets.config import NetConfig
from shoal.nets.layers import MLP
from shoal.ops import distributions, returns

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from shoal.kernels import triton as fused

DEVICE = "cpu" if fused.INTERPRET else "cuda"
EXACT, TF32 = 2e-5, 2e-2  # of the largest number: rounding of float32 over a thousand samples; ten bits of mantissa


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def perceptron(width_in: int, width_out: int, n: int, share: str, activation: str, hidden: tuple[int, ...] = (64, 64)) -> MLP:
    g = torch.Generator().manual_seed(1)
    net = MLP(width_in, width_out, n, NetConfig(hidden=hidden, activation=activation, share=share), g)  # type: ignore[arg-type]
    for p in net.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=g)  # biases too
    return net.to(DEVICE)


def fuse(net: MLP, x: Tensor, activation: str = "tanh", tf32: bool = False) -> Tensor:
    return fused.mlp(x, list(net.weights), list(net.biases), net.ids, activation, tf32)


def near(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert (got - want).abs().max() <= tolerance * max(1.0, want.abs().max())


def same(net: MLP, x: Tensor, activation: str, tf32: bool = False) -> None:
    """Outputs and all gradients are those of the module in float64."""
    tolerance = TF32 if tf32 and not fused.INTERPRET else EXACT
    precise = copy.deepcopy(net).double()
    x64 = x.detach().double().requires_grad_()
    want = precise(x64)
    x = x.detach().requires_grad_()
    got = fuse(net, x, activation, tf32)
    grad = draw(*got.shape, seed=2)
    near(got, want, tolerance)
    grads = torch.autograd.grad(got, [x, *net.parameters()], grad)
    for a, b in zip(grads, torch.autograd.grad(want, [x64, *precise.parameters()], grad.double()), strict=True):
        near(a, b, tolerance)
    flat = grads[1]._base
    assert flat is not None, "the gradients are views of one vector, in the order of the module's parameters"
    assert torch.equal(torch.cat([g.reshape(-1) for g in grads[1:]]), flat.reshape(-1))
    without = torch.autograd.grad(fuse(net, x.detach(), activation, tf32), list(net.parameters()), grad)
    assert all(torch.equal(a, b) for a, b in zip(without, grads[1:], strict=True))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(("n", "share"), [(1, "id"), (3, "id"), (5, "id"), (3, "plain"), (3, "none"), (5, "none")])
def test_a_perceptron_is_the_module_forward_and_backward(n: int, share: str, activation: str) -> None:
    same(perceptron(18, 5, n, share, activation), draw(7, 5, n, 18), activation)


@pytest.mark.parametrize(("width_in", "width_out"), [(1, 1), (18, 20), (54, 5), (200, 1), (18, 64)])
@pytest.mark.parametrize("share", ["id", "none"])
def test_widths_are_padded(width_in: int, width_out: int, share: str) -> None:
    same(perceptron(width_in, width_out, 3, share, "tanh"), draw(11, 3, width_in), "tanh")


@pytest.mark.parametrize("hidden", [(64,), (48, 20), (128, 128), (32, 64, 16)])
@pytest.mark.parametrize("share", ["id", "none"])
def test_hidden_layers_are_one_two_or_three(hidden: tuple[int, ...], share: str) -> None:
    same(perceptron(18, 5, 3, share, "relu", hidden), draw(6, 3, 18), "relu")


@pytest.mark.parametrize("rows", [1, 16, 333])
def test_samples_are_ragged_against_tiles_and_programs(rows: int) -> None:
    same(perceptron(18, 5, 3, "id", "tanh"), draw(rows, 3, 18), "tanh")
    same(perceptron(18, 5, 3, "none", "tanh"), draw(rows, 3, 18), "tanh")


@pytest.mark.parametrize("share", ["id", "none"])
def test_many_samples_take_the_other_setting(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MANY", 100)
    same(perceptron(18, 5, 3, share, "tanh"), draw(350, 3, 18), "tanh", tf32=True)


def test_tf32_is_close() -> None:
    same(perceptron(54, 3, 1, "id", "tanh"), draw(48, 1, 54), "tanh", tf32=True)


def test_inputs_need_not_be_contiguous() -> None:
    net, x = perceptron(18, 5, 3, "id", "tanh"), draw(18, 3, 9).permute(2, 1, 0)
    assert not x.is_contiguous()
    same(net, x, "tanh")
    same(net, draw(9, 1, 18).expand(9, 3, 18), "tanh")


def test_gradients_have_the_same_bits_each_time() -> None:
    net, x = perceptron(18, 5, 3, "id", "tanh"), draw(333, 3, 18)

    def once() -> list[Tensor]:
        y = fuse(net, x)
        return [y, *torch.autograd.grad(y.square().sum(), list(net.parameters()))]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_tanh_saturates_and_nan_stays() -> None:
    net = perceptron(18, 5, 1, "id", "tanh")
    near(fuse(net, draw(4, 1, 18) * 1e4), net(draw(4, 1, 18) * 1e4), EXACT)
    x = draw(4, 1, 18)
    x[1, 0, 3] = float("nan")
    for activation in ("tanh", "relu"):
        assert fuse(net, x, activation).isnan().all(-1)[:, 0].tolist() == [False, True, False, False]


def test_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_chip", lambda device: (132, 232_448))  # a Hopper
    assert fused.mlp_fits(18, (64, 64), 5, 3)
    assert fused.mlp_fits(54, (64, 64), 3, activation="relu")
    for tf32 in (False, True):  # exact products of wide layers spill
        assert fused.mlp_fits(200, (64, 64), 1, 5, tf32=tf32) == tf32
        assert fused.mlp_fits(18, (128, 128), 5, 3, tf32=tf32) == tf32
    for width_in, hidden, width_out, ids, activation in (
        (54, (128, 128), 3, 0, "tanh"),  # 233,472 bytes of shared memory where the input's gradient is wanted
        (18, (64, 64), 5, 3, "gelu"),
        (18, (), 5, 3, "tanh"),
        (18, (256, 256), 5, 3, "tanh"),
        (250, (64, 64), 5, 10, "tanh"),
        (18, (64, 64), 65, 3, "tanh"),
    ):
        assert not fused.mlp_fits(width_in, hidden, width_out, ids, activation, tf32=True)
    monkeypatch.setattr(fused, "_chip", lambda device: (84, 101_376))  # a smaller one
    assert fused.mlp_fits(18, (64, 64), 5, 3)
    assert not fused.mlp_fits(200, (64, 64), 1, 5, tf32=True)


@pytest.mark.parametrize("a", [1, 2, 5, 20, 128])
def test_choices_are_those_of_the_distribution(a: int) -> None:
    logits, noise = 2 * draw(67, 3, a), torch.rand(67, 3, a, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    noise[0, 0] = 0.0
    noise[0, 1, 0] = 1.0
    action, log_prob = fused.choose(logits, noise)
    choice = distributions.Choice(logits, (a,))
    assert action.dtype == torch.int64
    assert torch.equal(action, choice.sample(noise))
    near(log_prob, choice.log_prob(action), 1e-6)


def test_a_choice_exists_whatever_the_logits() -> None:
    logits = torch.full((4, 5), float("nan"), device=DEVICE)
    logits[1] = -float("inf")
    logits[2], logits[3, :4] = 0.0, -float("inf")
    logits[3, 4] = 1.0
    action, log_prob = fused.choose(logits, torch.full_like(logits, 0.5))
    assert ((action >= 0) & (action < 5)).all()
    assert action[2:].tolist() == [0, 4]
    assert log_prob[3] == 0


@pytest.mark.parametrize("a", [1, 2, 5, 20, 128])
def test_log_prob_and_entropy_and_their_gradients(a: int) -> None:
    logits = (3 * draw(67, 3, a)).requires_grad_()
    action = torch.randint(a, (67, 3), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    wide = logits.detach().double().requires_grad_()
    want = distributions.Choice(wide, (a,)).log_prob_and_entropy(action)
    got = fused.log_prob_and_entropy(logits, action)
    near(got[0], want[0], 1e-6)
    near(got[1], want[1], 1e-6)
    grads = draw(67, 3, seed=5), draw(67, 3, seed=6)
    (grad,) = torch.autograd.grad(got, logits, grads, retain_graph=True)
    (grad64,) = torch.autograd.grad(want, wide, [g.double() for g in grads], retain_graph=True)
    near(grad, grad64, 1e-6)
    (grad,) = torch.autograd.grad(got[1].sum(), logits)  # one of the two, and a gradient that is expanded
    near(grad, torch.autograd.grad(want[1].sum(), wide)[0], 1e-6)


@pytest.mark.parametrize(("t", "b", "n"), [(1, 1, 1), (25, 7, 3), (16, 40, 5), (9, 64, 1)])
def test_gae_is_that_of_returns(t: int, b: int, n: int) -> None:
    reward, value_t, value_tp1 = (draw(t, b, n, seed=k) for k in range(3))
    terminated = draw(t, b, n, seed=3) > 1
    whole, expanded = draw(t, b, n, seed=4) > 1, (draw(t, b, seed=5) > 1)[..., None].expand(t, b, n)
    for cut in (whole, expanded, torch.zeros_like(whole)):
        want = returns.gae(reward, value_t, value_tp1, terminated, cut, 0.99, 0.95)
        near(fused.gae(reward, value_t, value_tp1, terminated, cut, 0.99, 0.95), want, 2e-6)


@pytest.mark.skipif(fused.INTERPRET, reason="graphs are of a GPU")
def test_everything_can_be_captured() -> None:
    net, x, noise = perceptron(18, 5, 3, "id", "tanh"), draw(16, 3, 18), draw(16, 3, 5).sigmoid()

    def once() -> list[Tensor]:
        logits = fuse(net, x)
        action, log_prob = fused.choose(logits.detach(), noise)
        new, entropy = fused.log_prob_and_entropy(logits, action)
        parts = log_prob[None], new.detach()[None], entropy.detach()[None]
        over = torch.zeros(1, 16, 3, dtype=torch.bool, device=DEVICE)
        advantage = fused.gae(*parts, over, over, 0.99, 0.95)
        return [*parts, advantage, *torch.autograd.grad((new + entropy).sum(), list(net.parameters()))]

    want = once()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = once()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
