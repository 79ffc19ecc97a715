"""A2C is one step a rollout, along PPO's gradient where the ratio is one."""

import pytest
import torch
from bench import collect, make_loop

from shoal.algos.a2c import A2C
from shoal.algos.ppo import PPO
from shoal.algos.samples import Samples
from shoal.ids import catalog
from shoal.spec import UserError
from shoal.tree import tree_map


@pytest.mark.parametrize(
    ("env", "config", "net"),
    [
        ("probe_copy", {}, {}),
        ("probe_copy", {"actions": "continuous"}, {"trunk": "shared"}),
        ("probe_deaths", {}, {"memory": "gru"}),
        ("probe_turns", {}, {}),
        ("probe_illegal", {"actions": "multi"}, {}),
    ],
)
def test_one_step_is_that_of_ppo_with_one_epoch_and_one_minibatch(env, config, net):
    """-A log pi and -rho A have one gradient at rho = 1, where neither clip bites. The moments of Adam show the gradients."""
    algo = {
        "rollout": 16,
        "lr": 1e-3,
        "lr_critic": None if net.get("trunk") else 1e-3,
        "lam": 0.9,
        "entropy": 0.02,
        "critic": "own" if net else "world",
    }
    loop = make_loop("a2c", env, env=config, algo=algo, net=net)
    theirs = make_loop("ppo", env, env=config, algo={**algo, "epochs": 1, "minibatches": 1}, net=net).learners[0]
    a, batch = loop.learners[0], collect(loop)
    assert a.draws(16, 8) == 0
    before = {k: x.clone() for k, x in a.named_parameters()}
    metrics, ppo_metrics = a.update(Samples(a, tree_map(torch.clone, batch))), theirs.update(Samples(theirs, batch))
    state = theirs.state_dict()
    compared = [k for k in a.state_dict() if k in state]
    assert len(compared) > 10
    for k in compared:
        torch.testing.assert_close(a.state_dict()[k], state[k], rtol=0, atol=1e-6, msg=k)
    assert all(not torch.equal(x, before[k]) for k, x in a.named_parameters() if "weights" in k)
    assert a.actor_optimiser.steps == 1
    assert {"kl", "clip_fraction"} == set(ppo_metrics) - set(metrics)
    assert all(abs(metrics[k] - ppo_metrics[k]) < 1e-5 for k in metrics if k != "policy_loss")


def test_a_rollout_is_one_step_of_adam():
    loop = make_loop("a2c", "probe_copy", algo={"rollout": 5})
    a = loop.learners[0]
    for k in (1, 2, 3):
        loop.iterate()
        assert (a.actor_optimiser.steps, a.critic_optimiser.steps, loop.step) == (k, k, k * 5 * 8)


def test_names_set_the_critic():
    algos = catalog("algos")
    assert {id: e.settings for id, e in algos.items() if e.cls == "A2C"} == {
        "a2c": {},
        "ia2c": {"critic": "own"},
        "maa2c": {"critic": "world"},
    }
    # two agents that see three numbers each
    for id, width in (("a2c", 3), ("ia2c", 3), ("maa2c", 6)):
        a = make_loop(id, "probe_copy").learners[0]
        assert isinstance(a, A2C)
        assert a.critic.net.body.width_in == width


def test_a_rate_by_divergence_is_refused():
    for schedule in ("kl", "kl:0.01"):
        with pytest.raises(UserError, match=rf"--algo.lr-schedule is {schedule}, and A2C takes one step"):
            make_loop("a2c", "probe_copy", algo={"lr_schedule": schedule})
    assert make_loop("ppo", "probe_copy", algo={"lr_schedule": "kl"}).learners[0].lr_kl == 0.008


def test_it_knows_no_options_of_ratios_and_epochs():
    assert set(PPO.Config.__dataclass_fields__) - set(A2C.Config.__dataclass_fields__) == {
        "epochs",
        "minibatches",
        "minibatch_episodes",
        "clip",
        "clip_schedule",
        "clip_last",
        "value_clip",
        "kl_stop",
        "lr_kl_factor",
        "lr_kl_least",
        "lr_kl_most",
        "advantage_every",
    }
