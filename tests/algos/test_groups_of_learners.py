"""One learner of several groups, and several learners of one: what they compute of the same experience."""

from typing import Any

import pytest
import torch
from bench import make_learner, prepare, record_losses
from torch import Tensor

import shoal
from shoal.algos.ddpg import DDPG
from shoal.algos.ddqn import DDQN
from shoal.algos.ppo import PPO
from shoal.envs.regroup import Regrouping, respecified
from shoal.spec import Batch, EnvSpec
from shoal.training.collect import Collector, Players
from shoal.tree import tree_map

ALONE = "a=agent_0 b=agent_1 c=agent_2"


def split_batch(batch: Batch, old: EnvSpec, new: EnvSpec) -> Batch:
    """The same that happened, by other groups."""
    there = Regrouping(old, new)

    def parts(trees: dict[str, Any], agents_at: int) -> dict[str, Any]:
        out = {}
        for g, pieces in there.pieces.items():
            cut = [tree_map(lambda x, a=a, b=b: x.narrow(agents_at, a, b - a), trees[name]) for name, a, b in pieces]
            out[g] = cut[0] if len(cut) == 1 else tree_map(lambda *xs: torch.cat(xs, agents_at), *cut)
        return out

    frames = [type(f)(parts(f.views, 2), f.state) for f in (batch.frame, batch.next)]
    rest = [parts(x, 2) for x in (batch.actions, batch.results)]
    paid, memory, extras = parts(batch.learner_reward, 2), parts(batch.memory, 1), parts(batch.extras, 2)
    return Batch(*frames, *rest, batch.over, extras, memory, paid, batch.noise)


def rollout(learner: Any, env: Any, steps: int = 30) -> Batch:
    collector = Collector(env, Players(learner.spec, [learner]), torch.Generator().manual_seed(3))
    batch = collector.collect(steps)
    batch.learner_reward = {g: r.reward for g, r in batch.results.items()}
    return batch


def weights_of(learner: Any, groups: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """By names in which these groups are called agents."""
    state = {k: x.clone() for k, x in learner.state_dict().items()}
    return {".".join("agents" if part in groups else part for part in k.split(".")): x for k, x in state.items()}


def load(learner: Any, groups: tuple[str, ...], weights: dict[str, Tensor], i: int | None = None) -> None:
    """Weights of a learner of one group of all agents; `i`: of which it plays this one."""
    mine = {}
    for name, x in learner.state_dict().items():
        theirs = weights[".".join("agents" if part in groups else part for part in name.split("."))]
        if i is None or theirs.shape == x.shape:
            mine[name] = theirs
        else:  # each agent's own is [N, in, out], and that of one alone [out, in]; steps have no momentum yet
            mine[name] = x if "_optimiser" in name or "optimiser." in name else theirs[i].mT.reshape(x.shape)
    learner.load_state_dict(mine)


CASES: Any = [
    (PPO, {"critic": "world", "advantage_scope": "group", "epochs": 2, "minibatches": 2, "rollout": 30}, {}),
    (PPO, {"critic": "own", "advantage_scope": "batch", "epochs": 1, "minibatches": 1, "rollout": 30}, {"memory": "gru"}),
    (DDPG, {"critic": "world", "normalise_reward": True}, {}),
]


@pytest.mark.parametrize(("cls", "algo", "net"), CASES)
def test_one_learner_of_all_groups_computes_what_that_of_one_group_did(cls: Any, algo: Any, net: Any) -> None:
    """With normalisers and advantages joined: from the same weights and the same experience to the same weights."""
    env = shoal.make("simple_spread", 6)
    names, apart = ("front", "back"), respecified(env.spec, "front=agent_0,agent_1 back=agent_2")
    net = {"hidden": (8,), **net}
    one, joined = make_learner(cls, env.spec, net=net, **algo), make_learner(cls, apart, net=net, **algo)
    batch = rollout(one, env)
    batch.noise = torch.rand(one.draws(*batch.over.shape), generator=torch.Generator().manual_seed(5))
    before = weights_of(one)
    load(joined, names, before)
    metrics = [a.update(prepare(a, b)) for a, b in ((one, batch), (joined, split_batch(batch, env.spec, apart)))]
    assert set(metrics[0]) == set(metrics[1])
    for name, x in metrics[0].items():
        assert torch.equal(x, metrics[1][name]), name
    after = weights_of(one)
    assert sum(not torch.equal(before[k], after[k]) for k in before if ".norms." not in k) > 4
    for name, x in weights_of(joined, names).items():
        assert ".norms." in name or torch.equal(x, after[name]), name


@pytest.mark.parametrize("cls", [PPO, DDQN, DDPG])
def test_groups_of_one_learn_what_agents_with_nets_of_their_own_do(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """simple_spread in three groups of one, beside one group with --net.share none: the same targets and losses."""
    env = shoal.make("simple_spread", 6)
    apart = respecified(env.spec, ALONE)
    algo = {"advantage_scope": "agent", "normalise_value": False, "epochs": 1, "minibatches": 1} if cls is PPO else {}
    net = {"hidden": (8,), "share": "none"}
    whole = make_learner(cls, env.spec, net=net, **algo)
    batch = rollout(whole, env)
    before, alone = weights_of(whole), split_batch(batch, env.spec, apart)
    seen = record_losses(monkeypatch, several=cls is DDPG)
    together, told = whole.update(prepare(whole, batch)), [dict(seen[0])]
    one_by_one = []
    for i, g in enumerate(apart.groups):
        a = make_learner(cls, apart, groups=(g.name,), net=net, **algo)
        load(a, (g.name,), before, i)
        seen.clear()
        one_by_one.append(a.update(prepare(a, alone)))
        told.append(dict(seen[0]))
    for part in ("target", "loss") if cls is not PPO else ("target",):  # whose loss is summed elsewhere: see the metrics
        torch.testing.assert_close(torch.cat([x[part] for x in told[1:]], -1), told[0][part], rtol=1e-6, atol=1e-6)
    means = [k for k in together if "loss" in k or k in ("q", "predictQ", "td_error", "entropy")]
    assert len(means) >= 3
    for name in means:
        torch.testing.assert_close(sum(m[name] for m in one_by_one) / 3, together[name], rtol=1e-5, atol=1e-6)
