"""Actors and critics: shapes, and the plain nets that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.nets.config import NetConfig
from shoal.nets.encoders import Encoder, JointEncoder
from shoal.nets.heads import Actor, Critic, Net
from shoal.nets.layers import MLP
from shoal.nets.qnets import ActionCritic, Noisy, QNetwork
from shoal.ops.distributions import Choice, Normal, TanhNormal
from shoal.spec import Box, Discrete, Group, MultiDiscrete, Space, UserError

torch.set_num_threads(1)
BOX = Box((-1.0, 0.0), (1.0, 2.0))
SHARES = ("id", "plain", "none")
NAMES = ("agent_0", "agent_1", "agent_2")


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def config(share: str) -> NetConfig:
    return NetConfig((8,), share=share)


def body(head: Actor | Critic | QNetwork) -> MLP:
    assert isinstance(head.net.body, MLP)
    return head.net.body


@pytest.mark.parametrize("lead", [(), (5,), (6, 5)])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("space", "action", "width"), [(Discrete(5), (), 5), (MultiDiscrete((3, 2)), (2,), 5), (BOX, (2,), 2)])
def test_actor_shapes(space: Space, action: tuple[int, ...], width: int, share: str, lead: tuple[int, ...]) -> None:
    actor = Actor(4, space, 3, config(share), draw())
    pi = actor(torch.randn(*lead, 3, 4, generator=draw(1)))
    sample = pi.sample(torch.rand(*lead, 3, width, generator=draw(2)))
    assert sample.shape == pi.mode().shape == (*lead, 3, *action)
    assert pi.log_prob(sample).shape == pi.entropy().shape == (*lead, 3)


def test_actor_kinds() -> None:
    x = torch.zeros(2, 3, 4)
    assert type(Actor(4, Discrete(2), 3, config("id"), draw())(x)) is Choice
    assert type(Actor(4, BOX, 3, config("id"), draw())(x)) is Normal
    assert type(Actor(4, BOX, 3, config("id"), draw(), squash=True)(x)) is TanhNormal


def test_actor_begins_nearly_uniform() -> None:
    """The last layer's gain is a hundredth: logits within about 0.01 |h| of zero."""
    pi = Actor(4, Discrete(5), 3, config("id"), draw())(torch.randn(100, 3, 4, generator=draw(1)))
    assert pi.logits[0].abs().max().item() < 0.05
    assert pi.logits[0].abs().max().item() > 0


def test_actor_masks() -> None:
    legal = torch.tensor([False, True, False, False, True]).expand(100, 3, 5)
    pi = Actor(4, Discrete(5), 3, config("id"), draw())(torch.randn(100, 3, 4, generator=draw(1)), legal)
    assert set(pi.sample(torch.rand(100, 3, 5, generator=draw(2))).flatten().tolist()) == {1, 4}


@pytest.mark.parametrize(("share", "rows"), [("id", 1), ("plain", 1), ("none", 3)])
def test_standard_deviations_are_learnt_and_held(share: str, rows: int) -> None:
    actor = Actor(4, BOX, 3, config(share), draw(), log_std=-0.5)
    assert actor.log_std.shape == (rows, 2)
    assert "log_std" in dict(actor.named_parameters())
    pi = actor(torch.zeros(7, 3, 4))
    assert torch.equal(pi.log_std, torch.full((7, 3, 2), -0.5))
    with torch.no_grad():
        actor.log_std[-1, 0], actor.log_std[-1, 1] = 9.0, -9.0
    pi = actor(torch.zeros(7, 3, 4))
    assert pi.log_std[0, 2].tolist() == [2.0, -5.0]
    assert pi.log_std[0, 0].tolist() == ([2.0, -5.0] if rows == 1 else [-0.5, -0.5])


def test_discrete_actors_have_no_deviation() -> None:
    assert not hasattr(Actor(4, Discrete(2), 3, config("id"), draw()), "log_std")


@pytest.mark.parametrize("lead", [(), (5,), (6, 5)])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("central", [False, True])
def test_critic_shapes(central: bool, share: str, lead: tuple[int, ...]) -> None:
    critic = Critic(4, 3, config(share), draw(), central)
    x = torch.randn(*lead, 4, generator=draw(1)) if central else torch.randn(*lead, 3, 4, generator=draw(1))
    assert critic(x).shape == (*lead, 3)


@pytest.mark.parametrize("share", ["id", "plain"])
def test_central_critic_with_sharing_is_one_net_with_a_head_an_agent(share: str) -> None:
    critic = Critic(4, 3, config(share), draw(), central=True)
    first, last = body(critic).weights
    assert first.shape == (8, 4)  # no ids in it: it reads the state once
    assert last.shape == (3, 8)
    x = torch.randn(6, 4, generator=draw(1))
    torch.testing.assert_close(critic(x), torch.tanh(x @ first.T) @ last.T)
    assert critic(x).std(-1).min() > 0  # agents may be paid differently


def test_central_critic_without_sharing_is_a_net_an_agent() -> None:
    critic = Critic(4, 3, config("none"), draw(), central=True)
    first, last = body(critic).weights  # [3, 4, 8], [3, 8, 1]
    x = torch.randn(6, 4, generator=draw(1))
    expected = torch.stack([(torch.tanh(x @ first[i]) @ last[i])[:, 0] for i in range(3)], -1)
    torch.testing.assert_close(critic(x), expected)
    critic(x)[:, 1].sum().backward()
    assert first.grad is not None
    assert first.grad[1].abs().sum() > 0
    assert first.grad[0].abs().sum() == 0


def test_own_critic_sees_its_own_agent_alone() -> None:
    for share in SHARES:
        critic = Critic(4, 3, config(share), draw(), central=False)
        x = torch.randn(6, 3, 4, generator=draw(1))
        y = x.clone()
        y[:, 1] += 1
        moved = (critic(x) != critic(y)).any(0).tolist()
        assert moved == [False, True, False]


# --- one net for actor and critic ---


@pytest.mark.parametrize(("space", "params"), [(Discrete(5), 5), (MultiDiscrete((3, 2)), 5), (BOX, 2)])
def test_a_shared_trunk_puts_out_one_number_more(space: Space, params: int) -> None:
    actor = Actor(4, space, 3, NetConfig((8,), trunk="shared"), draw())
    first, last = body(actor).weights  # [8, 4], [params + 1, 8]
    assert last.shape == (params + 1, 8)
    torch.testing.assert_close(last[:-1] @ last[:-1].T, 1e-4 * torch.eye(params), rtol=0, atol=1e-9)  # a hundredth each
    assert last[-1].norm().item() == pytest.approx(1.0, abs=1e-5)
    x = torch.randn(6, 3, 4, generator=draw(1))
    hidden = torch.tanh(x @ first.T + body(actor).ids)
    pi, value, after = actor.unroll(x, None)
    given = pi.mean if isinstance(pi, Normal) else torch.cat(pi.logits, -1)
    torch.testing.assert_close(given, hidden @ last[:-1].T)
    torch.testing.assert_close(value, hidden @ last[-1])
    assert after == {}
    assert torch.equal(actor.value(x)[0], value)


def test_a_shared_trunk_with_memory_values_what_it_remembers() -> None:
    actor = Actor(4, Discrete(5), NAMES, NetConfig((8,), trunk="shared", memory="gru", memory_width=7), draw())
    assert actor.net.memory is not None
    last = actor.net.out.weights[0]
    assert last.shape == (6, 7)
    assert last.norm(dim=1).tolist() == pytest.approx([0.01] * 5 + [1.0], abs=1e-5)
    x, start = torch.randn(9, 2, 3, 4, generator=draw(1)), torch.zeros(9, 2, 3, dtype=torch.bool)
    pi, value, after = actor.unroll(x, None, actor.net.memory.zero(2, torch.device("cpu")), start)
    torch.testing.assert_close(value, after["hidden"] @ last[5])
    torch.testing.assert_close(pi.logits[0], after["hidden"] @ last[:5].T)


def test_a_trunk_that_a_central_critic_shares() -> None:
    """Features of what one sees make the actions; a net of its own values them, and what is seen of the world beside them.
    Weights: a trunk of 4 x 8 + 8, and 3 ids of 8; 8 x 6 + 6, actions of 6 x 5 + 5; a head of (6 + 2) x 6 + 6, 3 ids of 6, and
    6 + 1."""
    actor = Actor(4, Discrete(5), NAMES, NetConfig((8, 6), trunk="shared"), draw(), state_width=2)
    assert sum(p.numel() for p in actor.parameters()) == (32 + 8 + 24 + 54) + 35 + (54 + 18 + 7)
    assert sum(p.numel() for p in actor.net.parameters()) == 118
    assert actor.policy is not None
    assert actor.policy.weights[0].norm(dim=1).tolist() == pytest.approx([0.01] * 5, abs=1e-5)
    x, state = torch.randn(6, 3, 4, generator=draw(1)), torch.randn(6, 2, generator=draw(2))
    features, _ = actor.net(x)
    pi, value, after = actor.unroll((x, state), None)
    assert after == {}
    torch.testing.assert_close(pi.logits[0], features @ actor.policy.weights[0].T)
    wide = torch.cat((features, state[:, None].expand(6, 3, 2)), -1)
    torch.testing.assert_close(value, actor.critic(wide)[0][..., 0])
    assert torch.equal(actor.value((x, state))[0], value)
    alone, none, _ = actor.unroll(x, None)
    assert torch.equal(alone.logits[0], pi.logits[0])
    assert none is None
    assert all((actor.value(other)[0] != value).all() for other in ((x + 1, state), (x, state + 1)))
    wider = Actor(4, Discrete(5), NAMES, NetConfig((8, 6), critic_hidden=(3, 2), trunk="shared"), draw(), state_width=2)
    assert [tuple(w.shape) for w in wider.critic.body.weights] == [(3, 8), (2, 3), (1, 2)]


def test_a_trunk_with_memory_that_a_central_critic_shares_values_what_it_remembers() -> None:
    net = NetConfig((8,), trunk="shared", memory="gru", memory_width=7)
    actor = Actor(4, Discrete(5), NAMES, net, draw(), state_width=2)
    assert actor.net.memory is not None
    assert actor.policy is not None
    x, start = torch.randn(9, 2, 3, 4, generator=draw(1)), torch.zeros(9, 2, 3, dtype=torch.bool)
    state = torch.randn(9, 2, 2, generator=draw(2))
    pi, value, after = actor.unroll((x, state), None, actor.net.memory.zero(2, torch.device("cpu")), start)
    torch.testing.assert_close(pi.logits[0], after["hidden"] @ actor.policy.weights[0].T)
    wide = torch.cat((after["hidden"], state[..., None, :].expand(9, 2, 3, 2)), -1)
    torch.testing.assert_close(value, actor.critic(wide)[0][..., 0])


def test_with_trunks_of_their_own_an_actor_values_nothing() -> None:
    actor = Actor(4, Discrete(5), 3, config("id"), draw())
    assert body(actor).weights[-1].shape == (5, 8)
    assert actor.unroll(torch.zeros(6, 3, 4), None)[1] is None


# --- widths and gains ---


@pytest.mark.parametrize("central", [False, True])
def test_the_critic_may_have_widths_of_its_own(central: bool) -> None:
    net, out = NetConfig((8,), critic_hidden=(5, 7), share="plain"), 3 if central else 1
    assert [tuple(w.shape) for w in body(Actor(4, Discrete(5), 3, net, draw())).weights] == [(8, 4), (5, 8)]
    assert [tuple(w.shape) for w in body(Critic(4, 3, net, draw(), central)).weights] == [(5, 4), (7, 5), (out, 7)]
    straight = Critic(4, 3, NetConfig((8,), critic_hidden=(), share="plain"), draw(), central)
    assert [tuple(w.shape) for w in body(straight).weights] == [(out, 4)]


def test_gains_of_actor_and_critic_are_the_lengths_of_their_last_rows() -> None:
    net = NetConfig((8,), gain_actor=0.5, gain_critic=3.0)
    actor, own, central = Actor(4, BOX, 3, net, draw()), Critic(4, 3, net, draw()), Critic(4, 3, net, draw(), central=True)
    lengths = [body(head).weights[-1].norm(dim=1).tolist() for head in (actor, own, central)]
    assert lengths == [pytest.approx([0.5] * 2), pytest.approx([3.0]), pytest.approx([3.0] * 3)]
    both = Actor(4, BOX, 3, NetConfig((8,), gain_actor=0.5, gain_critic=3.0, trunk="shared"), draw())
    assert body(both).weights[-1].norm(dim=1).tolist() == pytest.approx([0.5, 0.5, 3.0])
    remembers = NetConfig((8,), gain_actor=0.5, gain_critic=3.0, memory="lstm")
    assert Actor(4, BOX, NAMES, remembers, draw()).net.out.weights[0].norm(dim=1).tolist() == pytest.approx([0.5] * 2)
    assert Critic(4, NAMES, remembers, draw()).net.out.weights[0].norm(dim=1).tolist() == pytest.approx([3.0])
    for w in body(Actor(4, BOX, 3, NetConfig((8,), gain_actor=0.5, share="none"), draw())).weights[-1]:  # [8, 2] of each agent
        assert w.norm(dim=0).tolist() == pytest.approx([0.5] * 2)


@pytest.mark.parametrize(
    ("share", "rows", "of"),
    [
        ("agent_0=a,agent_1=b,agent_2=a", 2, [0, 1, 0]),
        ("agent_0=a,agent_1=b,agent_2=c", 3, [0, 1, 2]),
        ("agent_0=a,agent_1=a,agent_2=a", 1, [0, 0, 0]),
    ],
)
def test_standard_deviations_by_name(share: str, rows: int, of: list[int]) -> None:
    actor = Actor(4, BOX, NAMES, config(share), draw(), log_std=-0.5)
    assert torch.equal(actor.log_std, torch.full((rows, 2), -0.5))
    with torch.no_grad():
        actor.log_std.copy_(torch.arange(rows)[:, None] / 4 + torch.tensor([0.0, 1.0]))
    pi = actor(torch.zeros(7, 3, 4))
    assert pi.log_std[6].tolist() == [[k / 4, k / 4 + 1] for k in of]
    pi.log_std.sum().backward()
    assert actor.log_std.grad is not None
    assert actor.log_std.grad.tolist() == [[7.0 * of.count(k)] * 2 for k in range(rows)]  # 7 rows, so many agents


# --- modules of one's own ---

MINE = """
import torch
from torch import nn


class Mine(nn.Module):
    def __init__(self, width_in, width_out, agents):
        super().__init__()
        self.made_for = width_in, width_out, agents
        self.line = nn.Linear(width_in, width_out)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.line(x))


class Twice(Mine):
    def forward(self, x):
        return torch.cat((self.line(x), self.line(x)), -1)


class Lazy(Mine):
    def __init__(self, *widths):
        super().__init__(*widths)
        self.line = nn.LazyLinear(widths[1])


class Pair(Mine):
    def forward(self, x):
        return x, x


class Bad(Mine):
    def forward(self, x):
        raise ValueError("not today")


def number(width_in, width_out, agents):
    return width_in
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def test_a_module_of_ones_own_stands_in_for_the_perceptrons(mine: str) -> None:
    net = NetConfig((8,), module=f"{mine}:Mine")
    made: dict[str, Any] = {
        "actor": Actor(4, Discrete(5), NAMES, net, draw()),
        "actor with values": Actor(4, Discrete(5), 3, NetConfig(trunk="shared", module=net.module), draw()),
        "critic": Critic(4, 3, net, draw()),
        "central critic": Critic(9, 3, net, draw(), central=True),
        "with memory": Critic(4, NAMES, NetConfig((8,), module=net.module, memory="gru", memory_width=6), draw()),
    }
    asked = {k: head.net.body.made_for for k, head in made.items()}
    assert asked == {
        "actor": (4, 5, 3),
        "actor with values": (4, 6, 3),
        "critic": (4, 1, 3),
        "central critic": (9, 1, 3),  # what they share, for each agent
        "with memory": (4, 6, 3),  # what the memory takes in
    }
    x, line = torch.randn(7, 3, 4, generator=draw(1)), made["actor"].net.body.line
    assert line.training  # as it was before it was tried
    torch.testing.assert_close(made["actor"].eval()(x).logits[0], x @ line.weight.T + line.bias)
    state = torch.randn(7, 9, generator=draw(1))
    assert made["central critic"](state).shape == (7, 3)


@pytest.mark.parametrize("name", ["Mine", "Lazy"])
def test_first_weights_of_a_module_of_ones_own_follow_the_generator_alone(mine: str, name: str) -> None:
    def weight(generator: torch.Generator) -> Any:
        return Net(4, 2, 3, NetConfig(module=f"{mine}:{name}"), generator).body.line.weight

    before = torch.random.get_rng_state()
    first, other, ours = weight(draw(0)), weight(draw(1)), draw(0)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(3)  # wherever the global one is
    assert torch.equal(first, weight(ours))
    assert not torch.equal(first, weight(ours))  # a second net is no copy of the first
    assert not torch.equal(first, other)


def test_a_module_may_be_named_by_its_import_path() -> None:
    assert isinstance(Net(3, 3, 2, NetConfig(module="torch.nn:Identity"), draw()).body, nn.Identity)


WRONG = {
    "FILE:Twice": "--net.module FILE:Twice made [2, 3, 4] of an input [2, 3, 4]: it must make [2, 3, 2].",
    "FILE:Pair": "--net.module FILE:Pair made [] of an input [2, 3, 4]: it must make [2, 3, 2].",
    "FILE:Bad": "--net.module is FILE:Bad, which could not be made with (4, 2, 3) and tried on an input [2, 3, 4]: "
    "ValueError: not today.",
    "FILE:number": "--net.module is FILE:number, which makes no nn.Module but int.",
    "FILE:Mien": "--net.module is 'FILE:Mien', and FILE has no 'Mien' (did you mean 'Mine'?).",
    "FILE.py:Mine": "there is no file FILE.py.",
    "no_such.nets:Mine": "--net.module is 'no_such.nets:Mine', and no_such.nets could not be loaded: "
    "ModuleNotFoundError: No module named 'no_such'.",
    "FILE": "--net.module is 'FILE': it takes package.module:Name or file.py:Name.",
}


@pytest.mark.parametrize("given", WRONG)
def test_modules_that_will_not_do(given: str, mine: str) -> None:
    with pytest.raises(UserError) as e:
        Net(4, 2, 3, NetConfig(module=given.replace("FILE", mine)), draw())
    assert str(e.value) == WRONG[given].replace("FILE", mine)


# --- values of choices ---

CHOICES = [(Discrete(5), (5,)), (MultiDiscrete((3, 2)), (3, 2))]


@pytest.mark.parametrize("lead", [(), (5,), (6, 5)])
@pytest.mark.parametrize("share", [*SHARES, "agent_0=a,agent_1=b,agent_2=a"])
@pytest.mark.parametrize(("dueling", "noisy"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("space", "sizes"), CHOICES)
def test_values_shapes(space: Any, sizes: Any, dueling: bool, noisy: bool, share: str, lead: tuple[int, ...]) -> None:
    net = QNetwork(4, space, NAMES, config(share), draw(), dueling, noisy)
    q, after = net(torch.randn(*lead, 3, 4, generator=draw(1)))
    assert q.shape == (*lead, 3, 5)
    assert after == {}
    assert net.noise == (8 + 5 + dueling * len(sizes) if noisy else 0)  # of the layer's inputs and outputs


def test_values_are_the_net_they_stand_for() -> None:
    net = QNetwork(4, Discrete(5), NAMES, config("id"), draw())
    first, last = body(net).weights
    x = torch.randn(6, 3, 4, generator=draw(1))
    torch.testing.assert_close(net(x)[0], torch.tanh(x @ first.T + body(net).ids) @ last.T)
    assert last.norm(dim=1).tolist() == pytest.approx([0.01] * 5)  # small first values, as the actor's gain says


@pytest.mark.parametrize(("space", "sizes"), CHOICES)
def test_dueling_values_are_a_value_and_advantages(space: Any, sizes: tuple[int, ...]) -> None:
    net = QNetwork(4, space, NAMES, config("plain"), draw(), dueling=True)
    first, last = body(net).weights
    assert last.shape == (5 + len(sizes), 8)
    x = torch.randn(6, 3, 4, generator=draw(1))
    out = torch.tanh(x @ first.T) @ last.T
    q = net(x)[0]
    at = 0
    for d, n in enumerate(sizes):
        part, a, v = q[..., at : at + n], out[..., at : at + n], out[..., 5 + d]
        torch.testing.assert_close(part.mean(-1), v)  # the mean of a dimension's values is its value
        torch.testing.assert_close(part - part[..., :1], a - a[..., :1])
        at += n


def test_values_with_memory() -> None:
    net = QNetwork(4, Discrete(5), NAMES, NetConfig((8,), memory="gru", memory_width=7), draw(), noisy=True)
    assert net.net.memory is not None
    assert net.noise == 8 + 5
    x, start = torch.randn(9, 2, 3, 4, generator=draw(1)), torch.zeros(9, 2, 3, dtype=torch.bool)
    state = net.net.memory.zero(2, torch.device("cpu"))
    q, after = net(x, state, start)
    assert q.shape == (9, 2, 3, 5)
    each, at = [], state
    for t in range(9):  # a step at a time
        one, at = net(x[t], at)
        each.append(one)
    torch.testing.assert_close(torch.stack(each), q)
    torch.testing.assert_close(at["hidden"], after["hidden"][-1])


# --- noise in the weights ---

# ndtr of 4, 1, 1/4, -1/4, -1: noise of which f(e) = sign(e) sqrt|e| makes 2, 1, 1/2, -1/2, -1
UNIFORM = {2.0: 0.9999683, 1.0: 0.8413447, 0.5: 0.5987063, 0.0: 0.5, -0.5: 0.4012937, -1.0: 0.1586553}


def noise_for(*f: float) -> torch.Tensor:
    return torch.tensor([UNIFORM[x] for x in f])


def noisy(share: str = "plain", width_in: int = 2, width_out: int = 2) -> Noisy:
    return Noisy(width_in, width_out, NAMES, config(share), draw())


def test_a_noisy_layer_by_hand() -> None:
    """w = [[1 2] [3 4]], b = 10 20, sigma = [[1 0.5] [2 4]], sigma_b = 3 1, x = 1 2; f in 1 -0.5, f out 0.5 -1."""
    layer = noisy()
    with torch.no_grad():
        layer.mean.weights[0].copy_(torch.tensor([[1.0, 2], [3, 4]]))
        layer.mean.biases[0].copy_(torch.tensor([10.0, 20]))
        layer.spread.weights[0].copy_(torch.tensor([[1.0, 0.5], [2, 4]]))
        layer.spread.biases[0].copy_(torch.tensor([3.0, 1]))
    x = torch.tensor([1.0, 2]).expand(1, 3, 2)
    mean = [15.0, 31.0]  # 1 + 4 + 10, 3 + 8 + 20
    assert layer(x, None)[0, 0].tolist() == mean
    assert layer(x, noise_for(0.0, 0.0, 0.0, 0.0))[0, 0].tolist() == mean
    # weights: 1 + 1 * 0.5 * 1 = 1.5, 2 + 0.5 * 0.5 * -0.5 = 1.875, 3 + 2 * -1 * 1 = 1, 4 + 4 * -1 * -0.5 = 6
    # biases: 10 + 3 * 0.5 = 11.5, 20 + 1 * -1 = 19:   1.5 + 3.75 + 11.5 = 16.75, 1 + 12 + 19 = 32
    assert layer(x, noise_for(1.0, -0.5, 0.5, -1.0))[0, 2].tolist() == pytest.approx([16.75, 32.0], abs=1e-4)
    # the root, not the number: e = 4 makes 2; with f in 2 0 and f out 1 0: 2 + 0.5 * 0, 1 + 1 * 2 + 4 + 10 + 3
    assert layer(x, noise_for(2.0, 0.0, 1.0, 0.0))[0, 0].tolist() == pytest.approx([20.0, 31.0], abs=2e-3)


@pytest.mark.parametrize("share", [*SHARES, "agent_0=a,agent_1=b,agent_2=a"])
def test_a_noisy_layer_has_the_weights_that_it_says(share: str) -> None:
    """Explicit weights w + sigma * f(e_out) f(e_in)^T, of every row and agent its own."""
    layer = noisy(share, 6, 4)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(generator=draw(3))
    x, noise = torch.randn(5, 3, 6, generator=draw(1)), torch.rand(5, 3, 10, generator=draw(2))
    out = layer(x, noise)
    normal = torch.distributions.Normal(0, 1).icdf(noise.double())
    f = (normal.sign() * normal.abs() ** 0.5).float()
    owners = config(share).owners(NAMES)

    def of(part: MLP, i: int) -> tuple[torch.Tensor, torch.Tensor]:  # [out, in], [out]
        w, b = part.weights[0], part.biases[0]
        return (w, b) if w.dim() == 2 else (w[owners[i]].T, b[owners[i], 0])

    for row in range(5):
        for i in range(3):
            (w, b), (sw, sb) = of(layer.mean, i), of(layer.spread, i)
            e_in, e_out = f[row, i, :6], f[row, i, 6:]
            expected = (w + sw * torch.outer(e_out, e_in)) @ x[row, i] + b + sb * e_out
            torch.testing.assert_close(out[row, i], expected, rtol=1e-4, atol=1e-4)


def test_noise_begins_at_half_over_the_root_of_the_inputs_and_learns() -> None:
    layer = noisy("plain", 16, 3)
    assert torch.equal(layer.spread.weights[0], torch.full((3, 16), 0.125))
    assert torch.equal(layer.spread.biases[0], torch.full((3,), 0.125))
    layer(torch.randn(5, 3, 16, generator=draw(1)), torch.rand(5, 3, 19, generator=draw(2))).sum().backward()
    assert layer.spread.weights[0].grad is not None
    assert layer.spread.weights[0].grad.abs().sum() > 0


def test_noisy_values_differ_with_the_noise_and_are_the_mean_without() -> None:
    net = QNetwork(4, Discrete(5), NAMES, config("plain"), draw(), noisy=True)
    x = torch.randn(1, 1, 4, generator=draw(1)).expand(7, 3, 4)  # all see the same
    mean, one = net(x)[0], net(x, noise=torch.rand(7, 3, net.noise, generator=draw(2)))[0]
    other, alike = net(x, noise=torch.rand(7, 3, net.noise, generator=draw(3)))[0], net(x, noise=torch.rand(net.noise))[0]
    assert torch.equal(mean, net(x, noise=torch.full((net.noise,), 0.5))[0])
    assert (one != mean).all()
    assert (one != other).all()
    assert one.flatten(0, 1).std(0).min() > 0  # every row and agent has noise of its own
    assert alike.flatten(0, 1).std(0).max() < 1e-6  # or all the same
    first, last = body(net).weights[0], net.out.mean.weights[0]  # type: ignore[union-attr]
    torch.testing.assert_close(mean, torch.tanh(x @ first.T) @ last.T)
    assert net(x, noise=torch.tensor([0.0, 1.0] * 6 + [0.0]))[0].isfinite().all()


# --- values of observations and actions ---


def action_critic(
    encoder: Any = 4, agents: tuple[str, ...] = NAMES, net: NetConfig | None = None, central: bool = False, out: int = 1
) -> ActionCritic:
    return ActionCritic(encoder, 2, out, agents, net or config("plain"), draw(), 0.5, central)


def layers(critic: ActionCritic) -> Any:
    assert isinstance(critic.head.body, MLP)
    return critic.head.body.weights


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("out", [1, 5])
@pytest.mark.parametrize("lead", [(), (6, 5)])
def test_actions_come_after_the_features(lead: tuple[int, ...], out: int, share: str) -> None:
    critic = action_critic(net=config(share), out=out)
    x, a = torch.randn(*lead, 3, 4, generator=draw(1)), torch.randn(*lead, 3, 2, generator=draw(2))
    features, after = critic.features(x)
    assert features is x  # nothing to encode
    assert after == {}
    q = critic(features, a)
    assert q.shape == (*lead, 3, out)
    first, last = layers(critic)
    both, body = torch.cat((x, a), -1), critic.head.body
    if share == "none":
        expected = torch.stack([torch.tanh(both[..., i, :] @ first[i]) @ last[i] for i in range(3)], -2)
    else:
        expected = torch.tanh(both @ first.T + (body.ids if share == "id" else 0)) @ last.T
        assert last.norm(dim=1).tolist() == pytest.approx([0.5] * out)  # the gain
    torch.testing.assert_close(q, expected)


def test_a_critic_of_actions_may_have_widths_of_its_own() -> None:
    assert [tuple(w.shape) for w in layers(action_critic(net=NetConfig((8,), critic_hidden=(5, 7), share="plain")))] == [
        (5, 6),
        (7, 5),
        (1, 7),
    ]


@pytest.mark.parametrize("memory", ["gru", "lstm"])
@pytest.mark.parametrize("agents", [NAMES, ("all",)])
def test_a_critic_of_actions_remembers_observations_alone(memory: str, agents: tuple[str, ...]) -> None:
    """Over a sequence as step by step, from a memory that is zero where an agent starts and held where it waits."""
    net, n = NetConfig((8,), memory=memory, memory_width=7, share="plain"), len(agents)  # type: ignore[arg-type]
    critic = action_critic(agents=agents, net=net)
    assert critic.memory is not None
    x, a = torch.randn(9, 2, n, 4, generator=draw(1)), torch.randn(9, 2, n, 2, generator=draw(2))
    start, active = torch.rand(9, 2, n, generator=draw(3)) < 0.3, torch.rand(9, 2, n, generator=draw(4)) < 0.7
    start[0], start[4], active[4] = False, True, True
    before = {k: torch.randn(2, n, 7, generator=draw(5)) for k in critic.memory.zero(2, torch.device("cpu"))}
    features, after = critic.features(x, before, start, active)
    assert features is after["hidden"]
    at = before
    for t in range(9):
        at = {k: s.masked_fill(start[t][..., None], 0) for k, s in at.items()}
        one, at = critic.features(x[t], at, None, active[t])
        torch.testing.assert_close(features[t], one)
        torch.testing.assert_close(critic(features, a)[t], critic(one, a[t]))
    torch.testing.assert_close(at["hidden"], after["hidden"][-1])
    again, _ = critic.features(x[4:], critic.memory.zero(2, torch.device("cpu")), start[4:], active[4:])
    torch.testing.assert_close(again, features[4:])  # all began anew in step 4
    other, _ = critic.features(x, critic.memory.zero(2, torch.device("cpu")), start, active)
    assert (other[0] != features[0]).all()
    first, last = layers(critic)  # actions come after the memory
    assert first.shape == (8, 7 + 2)
    torch.testing.assert_close(critic(features, a), torch.tanh(torch.cat((features, a), -1) @ first.T) @ last.T)
    inside = torch.tanh(x[0] @ critic.body.weights[0].T)  # a layer, activated, before the memory
    torch.testing.assert_close(critic.features(x[0], before)[0], critic.memory.step(inside, before)["hidden"])


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_one_critic_for_all_values_many_actions_at_once(memory: str) -> None:
    critic = action_critic(agents=("all",), net=NetConfig((8,), memory=memory, memory_width=7), central=True)  # type: ignore[arg-type]
    x, a = torch.randn(6, 5, 4, generator=draw(1)), torch.randn(6, 5, 3, 2, generator=draw(2))
    state = None if critic.memory is None else {"hidden": torch.randn(6, 5, 1, 7, generator=draw(3))}
    features, _ = critic.features(x, state)
    assert features.shape == (6, 5, 1, 4 if state is None else 7)
    q = critic(features, a)
    assert q.shape == (6, 5, 3, 1)
    for k in range(3):
        torch.testing.assert_close(q[..., k : k + 1, :], critic(features, a[..., k : k + 1, :]))
    first, last = layers(critic)
    both = torch.cat((features[..., 0, :], a[..., 1, :]), -1)
    torch.testing.assert_close(q[..., 1, :], torch.tanh(both @ first.T) @ last.T)
    assert q.std(-2).min() > 0


@pytest.mark.parametrize("share", SHARES)
def test_a_central_critic_of_actions_shows_all_agents_the_same(share: str) -> None:
    critic = action_critic(net=config(share), central=True)
    x, a = torch.randn(6, 5, 4, generator=draw(1)), torch.randn(6, 5, 3, 2, generator=draw(2))
    features, _ = critic.features(x)
    assert torch.equal(features, x[..., None, :].expand(6, 5, 3, 4))
    apart = action_critic(net=config(share))
    torch.testing.assert_close(critic(features, a), apart(features, a))
    b = a.clone()
    b[..., 1, :] += 1
    assert (critic(features, a) != critic(features, b))[..., 0].any(1).any(0).tolist() == [False, True, False]


def test_a_critic_of_actions_with_images() -> None:
    """Encoded once, before agents are a dimension where it is central, and before the memory."""
    net = NetConfig((8,), convolutions="2x3/1")
    group = Group("agents", "t", NAMES, (1, 5, 5), Discrete(2))
    x = torch.randint(0, 255, (6, 4, 3, 1, 5, 5), generator=draw(1), dtype=torch.uint8)
    a = torch.randn(6, 4, 3, 2, generator=draw(2))
    own = Encoder(group, NAMES, net, draw(3))
    critic = action_critic(own, net=net)
    features, _ = critic.features({"image": x})
    assert torch.equal(features, own({"image": x}))
    assert features.shape == (6, 4, 3, own.width)
    assert critic(features, a).shape == (6, 4, 3, 1)
    critic(features, a).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in own.parameters())  # it learns with the rest
    joint = JointEncoder((group,), net, draw(3))
    views = {"agents": ({"image": x}, None)}
    for agents, n in ((NAMES, 3), (("all",), 1)):
        features, _ = action_critic(joint, agents, net, central=True).features(views)
        assert torch.equal(features, joint(views)[..., None, :].expand(6, 4, n, joint.width))
    remembers = action_critic(own, net=NetConfig((8,), convolutions="2x3/1", memory="gru", memory_width=7))
    assert remembers.memory is not None
    start = torch.zeros(6, 4, 3, dtype=torch.bool)
    assert remembers.features({"image": x}, remembers.memory.zero(4, torch.device("cpu")), start)[0].shape == (6, 4, 3, 7)
