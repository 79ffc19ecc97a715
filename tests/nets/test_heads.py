"""Actors and critics: shapes, and the plain nets that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.nets.heads import Actor, Critic, Net
from shoal.nets.layers import MLP, NetConfig
from shoal.ops.distributions import Choice, Normal, TanhNormal
from shoal.spec import Box, Discrete, MultiDiscrete, Space, UserError

torch.set_num_threads(1)
BOX = Box((-1.0, 0.0), (1.0, 2.0))
SHARES = ("id", "plain", "none")
NAMES = ("agent_0", "agent_1", "agent_2")


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def config(share: str) -> NetConfig:
    return NetConfig((8,), share=share)


def body(head: Actor | Critic) -> MLP:
    assert isinstance(head.net.body, MLP)
    return head.net.body


@pytest.mark.parametrize("lead", [(), (5,), (6, 5)])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("space", "action", "width"), [(Discrete(5), (), 5), (MultiDiscrete((3, 2)), (2,), 5), (BOX, (2,), 2)])
def test_actor_shapes(space: Space, action: tuple[int, ...], width: int, share: str, lead: tuple[int, ...]) -> None:
    actor = Actor(4, space, 3, config(share), draw())
    pi = actor(torch.randn(*lead, 3, 4, generator=draw(1)))
    drawn = pi.sample(torch.rand(*lead, 3, width, generator=draw(2)))
    assert drawn.shape == pi.mode().shape == (*lead, 3, *action)
    assert pi.log_prob(drawn).shape == pi.entropy().shape == (*lead, 3)


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


def test_own_critic_looks_at_its_own_agent_alone() -> None:
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
    recalls = NetConfig((8,), gain_actor=0.5, gain_critic=3.0, memory="lstm")
    assert Actor(4, BOX, NAMES, recalls, draw()).net.out.weights[0].norm(dim=1).tolist() == pytest.approx([0.5] * 2)
    assert Critic(4, NAMES, recalls, draw()).net.out.weights[0].norm(dim=1).tolist() == pytest.approx([3.0])
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
        "judging actor": Actor(4, Discrete(5), 3, NetConfig(trunk="shared", module=net.module), draw()),
        "critic": Critic(4, 3, net, draw()),
        "central critic": Critic(9, 3, net, draw(), central=True),
        "with memory": Critic(4, NAMES, NetConfig((8,), module=net.module, memory="gru", memory_width=6), draw()),
    }
    asked = {k: head.net.body.made_for for k, head in made.items()}
    assert asked == {
        "actor": (4, 5, 3),
        "judging actor": (4, 6, 3),
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
    with pytest.raises(UserError) as told:
        Net(4, 2, 3, NetConfig(module=given.replace("FILE", mine)), draw())
    assert str(told.value) == WRONG[given].replace("FILE", mine)
