"""The CPU's fused kernels against PyTorch's own operations in float64, and whole updates with and without them."""

from __future__ import annotations

import copy
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.algos.optimiser import Optimiser
from shoal.algos.samples import Samples
from shoal.kernels import compiler, native
from shoal.nets.config import NetConfig
from shoal.nets.layers import MLP
from shoal.ops import distributions, losses, returns
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve

pytestmark = pytest.mark.compiler
EXACT = 2e-5  # of the largest number: rounding of float32 over a thousand samples


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def perceptron(width_in: int, width_out: int, n: int, share: str, activation: str, hidden: tuple[int, ...] = (64, 64)) -> MLP:
    g = torch.Generator().manual_seed(1)
    net = MLP(width_in, width_out, n, NetConfig(hidden=hidden, activation=activation, share=share), g)  # type: ignore[arg-type]
    for p in net.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=g)  # biases too
    return net


def fuse(net: MLP, x: Tensor, activation: str = "tanh") -> Tensor:
    return native.mlp(x, list(net.weights), list(net.biases), net.ids, activation)


def near(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert (got - want).abs().max() <= tolerance * max(1.0, want.abs().max())


def same(net: MLP, x: Tensor, activation: str) -> None:
    """Outputs and all gradients are those of the module in float64."""
    precise = copy.deepcopy(net).double()
    x64 = x.detach().double().requires_grad_()
    want = precise(x64)
    x = x.detach().requires_grad_()
    got = fuse(net, x, activation)
    grad = draw(*got.shape, seed=2)
    near(got, want, EXACT)
    grads = torch.autograd.grad(got, [x, *net.parameters()], grad)
    for a, b in zip(grads, torch.autograd.grad(want, [x64, *precise.parameters()], grad.double()), strict=True):
        near(a, b, EXACT)
    flat = grads[1]._base
    assert flat is not None, "the gradients are views of one vector, in the order of the module's parameters"
    assert torch.equal(torch.cat([g.reshape(-1) for g in grads[1:]]), flat.reshape(-1))
    without = torch.autograd.grad(fuse(net, x.detach(), activation), list(net.parameters()), grad)
    assert all(torch.equal(a, b) for a, b in zip(without, grads[1:], strict=True))
    with torch.no_grad():
        assert torch.equal(fuse(net, x, activation), got)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(("n", "share"), [(1, "id"), (3, "id"), (5, "id"), (3, "plain"), (3, "none"), (5, "none")])
def test_a_perceptron_is_the_module_forward_and_backward(n: int, share: str, activation: str) -> None:
    same(perceptron(18, 5, n, share, activation), draw(7, 5, n, 18), activation)


@pytest.mark.parametrize("width_in", [1, 18, 54, 200])
@pytest.mark.parametrize("width_out", [1, 5, 20, 64])
@pytest.mark.parametrize("share", ["id", "none"])
def test_widths_are_padded(width_in: int, width_out: int, share: str) -> None:
    same(perceptron(width_in, width_out, 3, share, "tanh"), draw(11, 3, width_in), "tanh")


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(64,), (1,), (48, 20), (128, 256), (32, 64, 16), (256, 100, 7)])
@pytest.mark.parametrize("share", ["id", "none"])
def test_hidden_layers_are_one_two_or_three(hidden: tuple[int, ...], share: str, activation: str) -> None:
    same(perceptron(18, 5, 3, share, activation, hidden), draw(30, 3, 18), activation)


@pytest.mark.parametrize("n", [1, 3, 4, 7, 17, 64])
def test_samples_are_ragged_against_blocks(n: int) -> None:
    for rows in (1, 16, 67, 1000 // n):
        same(perceptron(18, 5, n, "id", "tanh"), draw(rows, n, 18), "tanh")
    same(perceptron(18, 5, n, "none", "tanh"), draw(67, n, 18), "tanh")


@pytest.mark.parametrize(("n", "share"), [(3, "id"), (3, "none"), (1, "plain")])
def test_large_batches_in_pieces(n: int, share: str) -> None:
    same(perceptron(18, 5, n, share, "tanh"), draw(2 * native.PIECE // n + 7, 2, n, 18), "tanh")


def test_pieces_have_the_same_bits_whoever_works_on_them() -> None:
    net, x = perceptron(18, 5, 3, "id", "tanh"), draw(3000, 3, 18)
    grad, outcomes = draw(3000, 3, 5, seed=2), []
    for threads in (1, 3, 1):
        native.share(threads)
        y = fuse(net, x)
        outcomes.append([y, *torch.autograd.grad(y, list(net.parameters()), grad)])
    assert len(native._pieces(x)) == 9000 // native.PIECE
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


def test_types_are_checked() -> None:
    one = torch.zeros(2, 3, 4)
    with pytest.raises(AssertionError, match=r"takes torch.float32 was given torch.float64"):
        native.gae(one.double(), one, one, one > 0, one > 0, 0.9, 0.9)
    with pytest.raises(AssertionError, match=r"takes torch.int64 was given torch.int32"):
        native.log_prob_and_entropy(one, torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(AssertionError, match=r"takes torch.bool was given torch.float32"):
        native.ppo(one, one, one, one, one, 0.2, 0.01)


def test_worlds_that_pay_in_doubles() -> None:
    one, no = draw(4, 2, 3), torch.zeros(4, 2, 3, dtype=torch.bool)
    for kernels in (True, False):
        got = returns.gae(one.double(), one, one, no, no, 0.9, 0.9, kernels=kernels)
        assert got.dtype == torch.float32
        assert torch.equal(got, returns.gae(one, one, one, no, no, 0.9, 0.9, kernels=kernels))


def test_second_derivatives_are_refused() -> None:
    net, x = perceptron(4, 1, 1, "plain", "tanh"), draw(3, 1, 4).requires_grad_()
    out = fuse(net, x).square().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|not have been used"):
        torch.autograd.grad(grad.square().sum(), x)


def test_a_forked_child_has_its_own_threads() -> None:
    native.share(2)
    net, x = perceptron(18, 5, 3, "id", "tanh"), draw(3000, 3, 18)
    with torch.no_grad():
        want = fuse(net, x)
        if (child := os.fork()) == 0:
            signal.alarm(20)
            os._exit(0 if torch.equal(fuse(net, x), want) else 1)
    assert os.waitpid(child, 0)[1] == 0
    native.share(1)


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


def test_tanh_is_off_by_a_millionth_at_most_and_saturates() -> None:
    net = MLP(1, 1, 1, NetConfig((1,)), torch.Generator())
    for p, value in zip(net.parameters(), (1.0, 1.0, 0.0, 0.0), strict=True):
        p.data.fill_(value)
    x = torch.cat([torch.linspace(-20, 20, 100_001), torch.tensor([1e-6, 1e6, -1e30, float("inf"), -float("inf")])])
    near(fuse(net, x[:, None, None])[:, 0, 0], x.double().tanh(), 1e-6)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_goes_through(activation: str, bad: float) -> None:
    net, x = perceptron(18, 5, 1, "id", activation), draw(100, 1, 18)
    x[70, 0, 3] = bad
    y = fuse(net, x, activation)
    for grad in torch.autograd.grad(y.sum(), list(net.weights)[:1]):
        assert not grad.isfinite().all()
    if bad != bad:
        assert y.isnan().all(-1)[:, 0].nonzero().tolist() == [[70]]
    clean, grad = fuse(net, draw(100, 1, 18), activation), torch.ones(100, 1, 5)
    grad[70, 0, 3] = bad
    for g in torch.autograd.grad(clean, list(net.parameters()), grad):
        assert not g.isfinite().all()


def test_what_fits() -> None:
    assert native.mlp_fits(18, (64, 64), 5, 3)
    assert native.mlp_fits(512, (256, 256, 256), 64, 64, "relu")
    for width_in, hidden, width_out, ids, activation in (
        (18, (64, 64), 5, 3, "gelu"),
        (18, (), 5, 3, "tanh"),
        (18, (64,) * 4, 5, 3, "tanh"),
        (18, (64, 257), 5, 3, "tanh"),
        (513, (64, 64), 5, 3, "tanh"),
        (18, (64, 64), 65, 3, "tanh"),
        (18, (64, 64), 5, 65, "tanh"),
    ):
        assert not native.mlp_fits(width_in, hidden, width_out, ids, activation)


def test_what_does_not_fit_is_done_plainly() -> None:
    net = perceptron(18, 5, 3, "id", "gelu")
    net.use_kernels()
    assert not net.fused
    assert net(draw(4, 3, 18)).shape == (4, 3, 5)


@pytest.mark.parametrize("a", [1, 2, 5, 20, 128])
def test_choices_are_those_of_the_distribution(a: int) -> None:
    logits, noise = 2 * draw(67, 3, a), torch.rand(67, 3, a, generator=torch.Generator().manual_seed(3))
    noise[0, 0] = 0.0
    noise[0, 1, 0] = 1.0
    action, log_prob = native.choose(logits, noise)
    choice = distributions.Choice(logits.double(), (a,))
    assert action.dtype == torch.int64
    assert torch.equal(action, choice.sample(noise.double()))
    near(log_prob, choice.log_prob(action), 1e-6)


def test_a_choice_exists_whatever_the_logits() -> None:
    logits = torch.full((4, 5), float("nan"))
    logits[1] = -float("inf")
    logits[2], logits[3, :4] = 0.0, -float("inf")
    logits[3, 4] = 1.0
    action, log_prob = native.choose(logits, torch.full_like(logits, 0.5))
    assert ((action >= 0) & (action < 5)).all()
    assert action[2:].tolist() == [0, 4]
    assert log_prob[3] == 0
    assert log_prob[0].isnan()


@pytest.mark.parametrize("a", [1, 2, 5, 20, 128])
def test_log_prob_and_entropy_and_their_gradients(a: int) -> None:
    logits = (3 * draw(67, 3, a)).requires_grad_()
    action = torch.randint(a, (67, 3), generator=torch.Generator().manual_seed(4))
    wide = logits.detach().double().requires_grad_()
    want = distributions.Choice(wide, (a,)).log_prob_and_entropy(action)
    got = native.log_prob_and_entropy(logits, action)
    near(got[0], want[0], 1e-6)
    near(got[1], want[1], 1e-6)
    grads = draw(67, 3, seed=5), draw(67, 3, seed=6)
    (grad,) = torch.autograd.grad(got, logits, grads, retain_graph=True)
    (grad64,) = torch.autograd.grad(want, wide, [g.double() for g in grads], retain_graph=True)
    near(grad, grad64, 2e-6)  # times gradients of up to four
    (grad,) = torch.autograd.grad(got[1].sum(), logits)  # one of the two, and a gradient that is expanded
    near(grad, torch.autograd.grad(want[1].sum(), wide)[0], 2e-6)


def test_logits_that_are_not_numbers_are_seen() -> None:
    logits = draw(20, 5)
    logits[3, 2] = float("nan")
    logits.requires_grad_()
    log_prob, entropy = native.log_prob_and_entropy(logits, torch.zeros(20, dtype=torch.int64))
    assert log_prob.isnan().nonzero().tolist() == entropy.isnan().nonzero().tolist() == [[3]]
    (grad,) = torch.autograd.grad(log_prob.sum(), logits)
    assert grad[3].isnan().all()
    assert grad[[2, 4]].isfinite().all()


@pytest.mark.parametrize(("t", "b", "n"), [(1, 1, 1), (25, 7, 3), (16, 40, 5), (9, 64, 1)])
def test_gae_is_that_of_returns(t: int, b: int, n: int) -> None:
    reward, value_t, value_tp1 = (draw(t, b, n, seed=k) for k in range(3))
    terminated = draw(t, b, n, seed=3) > 1
    whole, expanded = draw(t, b, n, seed=4) > 1, (draw(t, b, seed=5) > 1)[..., None].expand(t, b, n)
    for cut in (whole, expanded, torch.zeros_like(whole)):
        want = returns.gae(reward.double(), value_t.double(), value_tp1.double(), terminated, cut, 0.99, 0.95)
        near(returns.gae(reward, value_t, value_tp1, terminated, cut, 0.99, 0.95, kernels=True), want, 2e-6)


def masks(*shape: int) -> list[Tensor | None]:
    return [None, draw(*shape, seed=9) > 0, torch.zeros(shape, dtype=torch.bool)]


def alike(loss: Callable[..., tuple[Tensor, dict[str, Tensor]]], of: int, *inputs: Tensor) -> None:
    """The sum, the gradient by the first `of` inputs and the means are those of plain operations in float64."""
    wide = [x.double().requires_grad_(k < of) for k, x in enumerate(inputs)]
    narrow = [x.clone().requires_grad_(k < of) for k, x in enumerate(inputs)]
    (want, want_means), (got, means) = loss(*wide, kernels=False), loss(*narrow, kernels=True)
    assert means.keys() == want_means.keys()
    for a, b in ((got, want), *((means[k], want_means[k]) for k in want_means)):
        near(a, b, 2e-6)
    for a, b in zip(torch.autograd.grad(3 * got, narrow[:of]), torch.autograd.grad(3 * want, wide[:of]), strict=True):
        near(a, b, 2e-6)


@pytest.mark.parametrize("shape", [(1, 1), (16, 1), (7, 3), (333, 3)])
def test_the_loss_of_ppo(shape: tuple[int, ...]) -> None:
    log_prob, entropy, old, advantage = (0.3 * draw(*shape, seed=k) for k in range(4))
    for mask in masks(*shape):

        def loss(a: Tensor, b: Tensor, c: Tensor, d: Tensor, kernels: bool, mask: Tensor | None = mask) -> Any:
            return losses.ppo(a, b, c, d, mask, 0.2, 0.01, kernels)

        alike(loss, 2, log_prob, entropy, old, advantage)
        alike(loss, 2, old, entropy, old, advantage)  # ratios of one: no KL, nothing clipped, the whole gradient


def test_an_approximate_kl_is_as_fine_as_it_is_small() -> None:
    log_prob, zero = torch.full((100,), 1e-4), torch.zeros(100)
    _, means = losses.ppo(log_prob, zero, zero, zero, None, 0.2, 0.0, kernels=True)
    assert means["kl"].item() == pytest.approx(5e-9, rel=1e-2)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (333, 3)])
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("huber", [None, 0.5])
def test_the_loss_of_values(shape: tuple[int, ...], clip: float | None, huber: float | None) -> None:
    value, old, target = (draw(*shape, seed=k) for k in range(3))
    old = value + 0.3 * old
    for mask in masks(*shape):

        def loss(a: Tensor, b: Tensor, c: Tensor, kernels: bool, mask: Tensor | None = mask) -> Any:
            return losses.value(a, b, c, mask, clip, huber, kernels)

        alike(loss, 1, value, old, target)
        alike(loss, 1, old, old, target)


@pytest.mark.parametrize("where", range(4))
def test_a_loss_that_is_not_a_number_is_seen(where: int) -> None:
    inputs = [0.3 * draw(50, seed=k) for k in range(4)]
    inputs[where][40] = float("nan")
    log_prob, entropy = inputs[0].requires_grad_(), inputs[1].requires_grad_()
    total, means = losses.ppo(log_prob, entropy, inputs[2], inputs[3], None, 0.2, 0.01, kernels=True)
    assert total.isnan()
    if where != 1:
        assert means["policy_loss"].isnan()
        assert torch.autograd.grad(total, log_prob)[0].isnan().nonzero().tolist() == [[40]]
    if where < 3:
        value = inputs[0].detach().requires_grad_()
        total, _ = losses.value(value, inputs[1].detach(), inputs[2], None, 0.2, None, kernels=True)
        assert total.isnan()
        assert torch.autograd.grad(total, value)[0].isnan().nonzero().tolist() == [[40]]


@pytest.mark.parametrize(("clip", "decay"), [(None, 0.0), (0.5, 0.0), (0.5, 0.1), (1e3, 0.0)])
def test_steps_of_adam(clip: float | None, decay: float) -> None:
    nets = [perceptron(18, 5, 3, "id", "tanh") for _ in range(2)]
    plain, fused = (Optimiser([net], 1e-2, decay, clip, kernels) for net, kernels in zip(nets, (False, True), strict=True))
    assert plain._kernel is None
    assert fused._kernel is not None

    def step(seed: int, times: float = 1.0, keep: bool | None = None) -> None:
        norms = []
        for o, net in ((plain, nets[0]), (fused, nets[1])):
            loss = sum((times * draw(*p.shape, seed=seed) * p).sum() for p in net.parameters())
            norms.append(o.descend(loss, 7, None if keep is None else torch.tensor(keep)))  # type: ignore[arg-type]
        assert torch.allclose(*norms, rtol=1e-5, equal_nan=True)
        for a, b in zip(
            (*plain.state_dict().values(), *nets[0].parameters()),
            (*fused.state_dict().values(), *nets[1].parameters()),
            strict=True,
        ):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6) if a.is_floating_point() else torch.equal(a, b)

    for k in range(20):
        step(k, keep=None if k < 10 else k != 15)
    assert (fused.steps, fused.broken) == (19, False)
    before = nets[1].weights[0].clone()
    step(20, float("nan"))
    step(21)
    assert (fused.steps, fused.broken) == (19, True)
    assert torch.equal(nets[1].weights[0], before)


def learner(mode: str, algo: str, env: str, share: str, reward: str = "own") -> Loop:
    sections = {"algo": {"rollout": 16}, "net": {"share": share}}
    run = {"envs": 8, "quiet": True, "steps": 10_000, "compile": mode, "reward": reward}
    return Loop(resolve(Settings(algo, env, run, sections)))


@pytest.mark.parametrize("share", ["id", "plain", "none"])
@pytest.mark.parametrize(
    ("algo", "env", "reward"),
    [
        ("ippo", "simple_spread", "own"),
        ("mappo", "simple_spread", "own"),
        ("ippo", "probe_deaths", "own"),
        ("ippo", "probe_deaths", "team-mean"),  # values of the dead
    ],
)
def test_updates_are_those_of_plain_operations(algo: str, env: str, reward: str, share: str) -> None:
    """Three iterations of sixteen steps of Adam each: weights differ by rounding alone."""
    plain, fused = (learner(mode, algo, env, share, reward) for mode in ("off", "fused"))
    a, plain_a = fused.learners[0], plain.learners[0]
    assert a.kernels
    assert all(m.fused for m in a.modules() if isinstance(m, MLP))
    assert not plain_a.kernels
    assert not any(m.fused for m in plain_a.modules() if isinstance(m, MLP))
    for _ in range(3):
        batch = plain.collector.collect(16)
        plain.shaping(batch)
        batch.noise = torch.rand(plain_a.draws(16, 8), generator=torch.Generator().manual_seed(6))
        metrics, expected = a.update(Samples(a, batch)), plain_a.update(Samples(plain_a, batch))
        assert metrics.keys() == expected.keys()
        for k, x in expected.items():
            assert torch.isclose(metrics[k], x, rtol=1e-3, atol=1e-5), k
    for (k, x), y in zip(a.state_dict().items(), plain_a.state_dict().values(), strict=True):
        assert torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-4), k


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    caches = compiler.compiler, compiler.processor, native._library
    for f in caches:
        f.cache_clear()
    why = native.why_not()
    assert why == "Perceptrons are not fused on the CPU: there is no C compiler: install cc, gcc or clang, or name one in $CC."
    assert not native.mlp_fits(18, (64, 64), 5)
    loop = learner("fused", "ippo", "simple_spread", "id")
    assert why in loop.remarks
    assert not loop.learners[0].kernels
    loop.iterate()
    for f in caches:
        f.cache_clear()


def test_a_tile_has_as_many_rows_in_python_as_in_c() -> None:
    assert re.findall(r"#define ROWS (\d+)", native.SOURCE.read_text()) == [str(native.ROWS)]


def test_the_processor_is_part_of_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags, processor = compiler.processor()
    assert not processor or "__" in processor
    for other in ("", "#define __ANOTHER__ 1"):
        compiler.library("int f(void) { return 1; }", ("-shared", "-fPIC", *flags), processor + other)
    assert len(list(tmp_path.rglob("*.so"))) == 2


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(("n", "share", "rows"), [(1, "plain", 67), (3, "id", 67), (3, "none", 67), (3, "id", native.PIECE)])
def test_weights_that_stand_still_hand_the_gradient_on_and_have_none(n: int, share: str, rows: int, activation: str) -> None:
    """As when an actor climbs a critic: the input's gradient is to the bit that which it is when the weights learn too."""
    net = perceptron(18, 5, n, share, activation, (64, 20))
    x, grad = draw(rows, n, 18).requires_grad_(), draw(rows, n, 5, seed=2)
    learnt, *_ = torch.autograd.grad(fuse(net, x, activation), [x, *net.parameters()], grad)
    precise = copy.deepcopy(net).double()
    wide = x.detach().double().requires_grad_()
    near(learnt, torch.autograd.grad(precise(wide), wide, grad.double())[0], EXACT)
    net.requires_grad_(False)
    out = fuse(net, x, activation)
    out.backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, learnt)
    assert all(p.grad is None for p in net.parameters())
    assert not fuse(net, x.detach(), activation).requires_grad
    net.requires_grad_(True)  # and they learn again
    again = torch.autograd.grad(fuse(net, x.detach(), activation), list(net.parameters()), grad)
    assert all(g.abs().sum() > 0 for g in again)


def test_a_fused_module_that_is_frozen_passes_gradients_through() -> None:
    plain, fused = (perceptron(6, 1, 2, "id", "tanh", (16,)) for _ in range(2))
    fused.use_kernels()
    assert fused.fused
    x, (first, *_) = draw(9, 2, 6), plain.weights
    grads = []
    for net in (plain.requires_grad_(False), fused.requires_grad_(False)):
        at = x.clone().requires_grad_()
        grads.append(torch.autograd.grad(net(at).sum(), at)[0])
    near(grads[1], grads[0], EXACT)
    assert (grads[1] != 0).all()
    assert first.grad is None
