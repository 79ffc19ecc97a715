"""Memory against PyTorch's own cells, a step and a chunk at a time; who starts forgets, who waits holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.algos.onpolicy import Minibatch
from shoal.algos.samples import Samples
from shoal.nets.config import NetConfig
from shoal.nets.heads import Net
from shoal.nets.memory import Memory, State
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_leaves, tree_map

torch.set_num_threads(1)
NAMES = ("agent_0", "agent_1", "agent_2")
OWNERS = {"id": [0, 0, 0], "plain": [0, 0, 0], "none": [0, 1, 2], "agent_0=a,agent_1=b,agent_2=a": [0, 1, 0]}
KINDS: Any = ("gru", "lstm")
T, B, N, F, H = 24, 5, 3, 4, 6
CPU = torch.device("cpu")


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=draw(seed))


def coin(p: float, *shape: int, seed: int = 2) -> Tensor:
    return torch.rand(*shape, generator=draw(seed)) < p


def memory_of(kind: Any, share: str = "id") -> Memory:
    memory = Memory(F, NAMES, NetConfig(memory=kind, memory_width=H, share=share), draw())
    with torch.no_grad():  # biases begin at zero: give them something to get wrong
        for k, part in enumerate((memory.inward, memory.inner)):
            part.biases[0].copy_(normal(*part.biases[0].shape, seed=7 + k))
    return memory


def some_state(memory: Memory, *lead: int) -> State:
    return {k: normal(*lead, N, H, seed=5 + i) for i, k in enumerate(memory.zero(1, CPU))}


def cell_of(memory: Memory, owner: int) -> nn.GRUCell | nn.LSTMCell:
    """PyTorch's own with the weights of one set. Its gates are r, z, n; of the LSTM i, f, g, o, where ours are i, f, o, g."""
    cell = nn.LSTMCell(F, H) if memory.lstm else nn.GRUCell(F, H)
    gates = torch.arange(4 * H).reshape(4, H)[[0, 1, 3, 2]].flatten() if memory.lstm else torch.arange(3 * H)
    with torch.no_grad():
        for name, part in (("ih", memory.inward), ("hh", memory.inner)):
            weight = part.weights[0] if part.sets == 1 else part.weights[0][owner].T
            bias = part.biases[0] if part.sets == 1 else part.biases[0][owner, 0]
            getattr(cell, f"weight_{name}").copy_(weight[gates])
            getattr(cell, f"bias_{name}").copy_(bias[gates])
    return cell


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", OWNERS)
def test_steps_are_those_of_pytorchs_cells(share: str, kind: str) -> None:
    memory, owners = memory_of(kind, share), OWNERS[share]
    assert memory.inward.sets == max(owners) + 1
    x, state, compared = normal(8, B, N, F), some_state(memory, B), 0
    ours = state
    theirs = [tuple(s[:, i] for s in state.values()) for i in range(N)]
    for t in range(8):
        ours = memory.step(x[t], ours)
        for i in range(N):
            cell = cell_of(memory, owners[i])
            theirs[i] = cell(x[t, :, i], theirs[i]) if isinstance(cell, nn.LSTMCell) else (cell(x[t, :, i], theirs[i][0]),)
            for mine, other in zip(ours.values(), theirs[i], strict=True):
                torch.testing.assert_close(mine[:, i], other, rtol=0, atol=1e-6)
                compared += 1
    assert compared == 8 * N * (2 if kind == "lstm" else 1)


def test_a_step_in_numbers() -> None:
    """One number in, one remembered, all weights zero but the biases: gates of 1/2 where the bias is 0."""
    gru = Memory(1, ("a",), NetConfig(memory="gru", memory_width=1), draw())
    lstm = Memory(1, ("a",), NetConfig(memory="lstm", memory_width=1), draw())
    with torch.no_grad():
        for m in (gru, lstm):
            for p in m.parameters():
                p.zero_()
        gru.inward.biases[0].copy_(torch.tensor([0.0, torch.tensor(3.0).log().item(), 0.25]))
        gru.inner.biases[0].copy_(torch.tensor([0.0, 0.0, 0.5]))
        lstm.inward.biases[0].copy_(torch.tensor([0.0, torch.tensor(3.0).log().item(), 0.0, 0.5]))
    x, held = torch.ones(1, 1), torch.full((1, 1), 0.8)
    # r = 1/2, z = 3/4, n = tanh(1/4 + 1/2 1/2) = tanh 1/2: a quarter of it and three of 0.8
    tanh_half = 0.46211716
    assert gru.step(x, {"hidden": held})["hidden"].item() == pytest.approx(tanh_half / 4 + 0.6, abs=1e-6)
    # i = o = 1/2, f = 3/4, g = tanh 1/2: three quarters of the cell's 0.8 and half of g
    after = lstm.step(x, {"hidden": held, "cell": held})
    cell = 0.6 + tanh_half / 2
    assert after["cell"].item() == pytest.approx(cell, abs=1e-6)
    assert after["hidden"].item() == pytest.approx(torch.tensor(cell).tanh().item() / 2, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_begins_at_zero(kind: str) -> None:
    zero = memory_of(kind).zero(B, CPU)
    assert list(zero) == (["hidden", "cell"] if kind == "lstm" else ["hidden"])
    assert all(torch.equal(x, torch.zeros(B, N, H)) for x in zero.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", OWNERS)
def test_a_sequence_is_its_steps(share: str, kind: str) -> None:
    memory, x, start, active = memory_of(kind, share), normal(T, B, N, F), coin(0.1, T, B, N), coin(0.7, T, B, N, seed=3)
    state = some_state(memory, B)
    after = memory(x, state, start, active)
    assert all(s.shape == (T, B, N, H) for s in after.values())
    for t in range(T):
        state = memory.step(x[t], state, start[t], active[t])
        for k in state:
            torch.testing.assert_close(after[k][t], state[k], rtol=0, atol=1e-6)


def same(a: State, b: State) -> None:
    assert list(a) == list(b)
    for k in a:
        torch.testing.assert_close(a[k], b[k], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_who_starts_begins_from_zero_and_nobody_else(kind: str) -> None:
    """Agent 1 of row 0 arrives late, in step 3; in step 4 row 2 begins a new episode."""
    memory, x, never = memory_of(kind), normal(8, B, N, F), torch.zeros(8, B, N, dtype=torch.bool)
    state, start = some_state(memory, B), never.clone()
    start[3, 0, 1] = start[4, 2] = True
    undisturbed, after = memory(x, state, never, None), memory(x, state, start, None)
    arrival, episode = (memory(x[t:], memory.zero(B, CPU), never[t:], None) for t in (3, 4))
    expected = tree_map(torch.clone, undisturbed)
    for k in expected:
        expected[k][3:, 0, 1] = arrival[k][:, 0, 1]
        expected[k][4:, 2] = episode[k][:, 2]
        assert (expected[k] - undisturbed[k]).abs().amax((0, 3)).nonzero().tolist() == [[0, 1], [2, 0], [2, 1], [2, 2]]
    same(after, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_neither_forgets_nor_learns(kind: str) -> None:
    """Agent 0 acts in steps 0, 3 and 4: it remembers those, whatever it sees between; the others act all the time."""
    memory, x, active = memory_of(kind), normal(6, B, N, F), torch.ones(6, B, N, dtype=torch.bool)
    active[[1, 2, 5], :, 0] = False
    junk = x.clone()
    junk[[1, 2, 5], :, 0] = 4096.0
    never, state = torch.zeros(6, B, N, dtype=torch.bool), some_state(memory, B)
    after, others = memory(junk, state, never, active), memory(x, state, never, None)
    turns = memory(x[[0, 3, 4]], state, never[:3], None)
    for k in after:
        torch.testing.assert_close(after[k][:, :, 1:], others[k][:, :, 1:], rtol=0, atol=1e-6)
        torch.testing.assert_close(after[k][[0, 3, 4], :, 0], turns[k][:, :, 0], rtol=0, atol=1e-6)
        for t, held in ((1, 0), (2, 0), (5, 4)):
            assert torch.equal(after[k][t, :, 0], after[k][held, :, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_who_starts_and_waits_remembers_nothing(kind: str) -> None:
    memory, nobody = memory_of(kind), torch.zeros(B, N, dtype=torch.bool)
    state, start = some_state(memory, B), nobody.clone()
    start[1, 2] = True
    after = memory.step(normal(B, N, F), state, start, nobody)
    for k in state:
        expected = state[k].clone()
        expected[1, 2] = 0
        assert torch.equal(after[k], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", OWNERS)
def test_chunks_begun_from_the_memory_before_them_are_the_whole(share: str, kind: Any) -> None:
    net = Net(F, 2, NAMES, NetConfig((8, 7), memory=kind, memory_width=H, share=share), draw())
    assert net.memory is not None
    x, start, active = normal(T, B, N, F), coin(0.1, T, B, N), coin(0.7, T, B, N, seed=3)
    first = some_state(net.memory, B)
    out, after = net(x, first, start, active)
    assert out.shape == (T, B, N, 2)
    for at in range(0, T, 6):
        before = first if at == 0 else {k: s[at - 1] for k, s in after.items()}
        part = slice(at, at + 6)
        out_again, after_again = net(x[part], before, start[part], active[part])
        torch.testing.assert_close(out_again, out[part], rtol=0, atol=1e-6)
        same(after_again, {k: s[part] for k, s in after.items()})
    single, after_single = net(x[6], {k: s[5].masked_fill(start[6, ..., None], 0) for k, s in after.items()}, None, active[6])
    torch.testing.assert_close(single, out[6], rtol=0, atol=1e-6)  # as one acts, memory zeroed by whoever asks
    same(after_single, {k: s[6] for k, s in after.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_back_to_the_last_start_and_not_to_what_was_waited_through(kind: str) -> None:
    memory, x = memory_of(kind), normal(8, B, N, F).requires_grad_()
    state = {k: s.requires_grad_() for k, s in some_state(memory, B).items()}
    start, active = torch.zeros(8, B, N, dtype=torch.bool), torch.ones(8, B, N, dtype=torch.bool)
    start[3, :, 1] = True
    active[5, :, 2] = False
    memory(x, state, start, active)["hidden"][-1].sum().backward()
    assert x.grad is not None
    reached = x.grad.abs().sum((1, 3)) > 0  # [8, N]
    assert reached[:, 0].tolist() == [True] * 8
    assert reached[:, 1].tolist() == [False] * 3 + [True] * 5
    assert reached[:, 2].tolist() == [True] * 5 + [False] + [True] * 2
    for s in state.values():
        assert s.grad is not None
        assert (s.grad.abs().sum((0, 2)) > 0).tolist() == [True, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_layers_before_a_memory(kind: Any) -> None:
    """All hidden layers stand before it, the last of them activated; without any there is one as wide as the memory."""
    net = Net(F, 2, NAMES, NetConfig((8, 7), memory=kind, memory_width=H, share="plain", layer_norm=True), draw())
    widths = {k: tuple(p.shape) for k, p in net.named_parameters() if p.dim() == 2}
    gates = H * (4 if kind == "lstm" else 3)
    assert widths == {
        "body.weights.0": (8, F),
        "body.weights.1": (7, 8),
        "memory.inward.weights.0": (gates, 7),
        "memory.inner.weights.0": (gates, H),
        "out.weights.0": (2, H),
    }
    assert len(net.body.scales) == 2
    none = Net(F, 2, NAMES, NetConfig((), memory=kind, memory_width=H, share="plain"), draw())
    x, state = normal(B, N, F), some_state(memory_of(kind), B)
    assert none.memory is not None
    inside = torch.tanh(x @ none.body.weights[0].T)
    expected = none.memory.step(inside, state)
    out, after = none(x, state)
    same(after, expected)
    torch.testing.assert_close(out, expected["hidden"] @ none.out.weights[0].T)


# --- in a learner ---


@pytest.mark.parametrize("chunk", [4, 16])
@pytest.mark.parametrize("env", ["probe_deaths", "probe_turns", "simple_spread"])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_a_learner_begin_from_the_memory_it_acted_with(
    kind: str, env: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second rollout, whose first memory is not zero: log-probabilities of the shuffled chunks are those of the
    rollout, whoever died, waited or began anew; and no gradient goes past a chunk's beginning."""
    algo = {"rollout": 16, "chunk": chunk, "epochs": 2, "minibatches": 2, "lr": 1e-9}
    sections: Any = {"algo": algo, "net": {"memory": kind, "memory_width": 8, "hidden": (8,)}}
    loop = Loop(resolve(Settings("mappo", env, {"envs": 8, "quiet": True, "steps": 10_000}, sections)))
    learner: Any = loop.learners[0]
    (name,), given, actor_loss = learner.groups, [], learner.actor_loss

    def watched(log_prob: Tensor, entropy: Tensor, minibatch: Minibatch) -> Any:
        given.append((log_prob.detach(), minibatch))
        return actor_loss(log_prob, entropy, minibatch)

    monkeypatch.setattr(learner, "actor_loss", watched)
    for _ in range(2):
        given.clear()
        batch = loop.collector.collect(16)
        loop.shaping(batch)
        view, acted_with = batch.frame[name], loop.collector.memory[name]
        observations, first = learner.observations, batch.memory[name]
        *_, actors = learner.actor.unroll(observations.actor_input(batch.frame), None, first["actor"], view.start, view.active)
        *_, critics = learner.critic.value(observations.critic_input(batch.frame), first["critic"], view.start, view.active)
        same({k: s[-1] for k, s in actors.items()}, acted_with["actor"])
        same({k: s[-1] for k, s in critics.items()}, acted_with["critic"])
        batch.noise = torch.rand(learner.draws(16, 8), generator=draw())
        learner.update(Samples(learner, batch))
    assert all(x.abs().sum() > 0 for x in tree_leaves(batch.memory))
    assert [log_prob.shape[:2] for log_prob, _ in given] == [(chunk, 16 // chunk * 8 // 2)] * 4
    for log_prob, minibatch in given:
        active = torch.ones_like(minibatch.start) if minibatch.active is None else minibatch.active
        assert active.any()
        assert not any(x.requires_grad for x in tree_leaves(minibatch.memory))
        value, _ = learner.critic.value(minibatch.critic_input, *minibatch.memory_of("critic"))
        torch.testing.assert_close(log_prob[active], minibatch.log_prob[active], rtol=0, atol=1e-6)
        torch.testing.assert_close(value[active], minibatch.value[active], rtol=0, atol=1e-5)
