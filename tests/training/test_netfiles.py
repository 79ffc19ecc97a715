"""What is in the files of nets (`--save.nets`), read by plain PyTorch and beside what the policy does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_nets_apart import apart, load, train
from torch import Tensor, nn

import shoal
from shoal.algos.base import Seat
from shoal.ids import find
from shoal.nets.config import NetConfig
from shoal.nets.encoders import Encoder
from shoal.nets.heads import Actor
from shoal.spec import Box, Discrete, Frame, Group, Slots, View
from shoal.training.netfiles import net_files, of_agent
from shoal.tree import tree_map

torch.set_num_threads(1)
DOCS = Path(__file__).parents[2] / "docs" / "runs.md"
ASK = ["--save.nets", "true", "--save.keep", 0, "--algo.lr", "1e-2"]
ALONE = [*ASK, "--net.share", "none"]


def observations(run: shoal.Run) -> dict[str, Tensor]:
    """Of each agent of simple_spread; some numbers are beyond the clip."""
    names = [a for g in run.spec.groups for a in g.agents]
    x = torch.randn(len(names), 18, generator=torch.Generator().manual_seed(0)) * 4
    return dict(zip(names, x, strict=True))


def greedy(run: shoal.Run, seen: dict[str, Tensor], memory: Any = None) -> Any:
    return shoal.load(run, "last").act({a: x.tolist() for a, x in seen.items()}, memory)


def normal(x: Tensor, norm: dict[str, Tensor]) -> Tensor:
    shift, scale = (norm[f"observations.norms.agents.{k}"] for k in ("shift", "scale"))
    return ((x - shift) / scale).clamp(-10, 10)


def layers(x: Tensor, net: dict[str, Tensor], path: str = "net.body.", of_id: Tensor | float = 0.0) -> Tensor:
    """A perceptron."""
    for k in range(sum(name.startswith(f"{path}weights.") for name in net)):
        x = nn.functional.linear(x.tanh() if k else x, net[f"{path}weights.{k}"], net[f"{path}biases.{k}"])
        x = x if k else x + of_id
    return x


def test_an_agents_file_does_what_the_docs_say(tmp_path: Path) -> None:
    """The block of docs/runs.md as printed, for each agent."""
    run = train(tmp_path / "RUN", *ALONE, "--net.hidden", "64,64")
    assert apart(run)["last"] == {f"agents.{i}.{net}.pt" for i in range(3) for net in ("actor", "critic")}
    (block,) = re.findall(r"```python\n(.+?)```", DOCS.read_text(), re.DOTALL)
    seen, learnt = observations(run), shoal.load(run, "last").players.algorithms[0]
    chosen, _ = greedy(run, seen)
    norm: Any = learnt.observations.norms["agents"]
    with torch.no_grad():
        params = learnt.actor.net(norm.normalise(torch.stack(list(seen.values())), 10.0))[0]
    for i, (agent, x) in enumerate(seen.items()):
        told: dict[str, Any] = {}
        exec(block.replace("RUN/", f"{run.path}/").replace("agents.0.", f"agents.{i}."), told)
        assert told["file"]["agents"] == [agent]
        torch.testing.assert_close(told["logits"](x), params[i], rtol=1e-4, atol=1e-5)
        assert int(told["logits"](x).argmax()) == chosen[agent]
    assert not torch.allclose(params[0], params[1])
    state = run.load("last")["algorithms"]["agents"]
    names = {k for k in state if k.startswith(("observations.", "value_norm."))}
    assert told["norm"].keys() == names
    assert all(torch.equal(told["norm"][k], state[k]) for k in names)
    assert told["norm"]["observations.norms.agents.count"] > 0


def test_a_net_that_is_shared_is_one_file_with_ids_and_normalisers(tmp_path: Path) -> None:
    run = train(tmp_path / "r", *ASK, algo="mappo")
    actor, critic, seen = load(run, "agents.actor"), load(run, "agents.critic"), observations(run)
    chosen, _ = greedy(run, seen)
    assert actor["agents"] == critic["agents"] == list(seen)
    for i, (agent, x) in enumerate(seen.items()):
        out = layers(normal(x, actor["normaliser"]), actor["net"], of_id=actor["net"]["net.body.ids"][i])
        assert int(out.argmax()) == chosen[agent]
    norm = critic["normaliser"]
    value = layers(torch.cat([normal(x, norm) for x in seen.values()]), critic["net"])
    live, every = torch.ones(1, 1, 3, dtype=torch.bool), torch.stack(list(seen.values()))[None, None]
    with torch.no_grad():
        expected = shoal.load(run, "last").players.algorithms[0].values(Frame({"agents": View(every, live, live, live)}))
    assert expected is not None
    torch.testing.assert_close(
        value * norm["value_norm.scale"] + norm["value_norm.shift"], expected[0, 0], rtol=1e-4, atol=1e-5
    )


def test_an_agent_that_remembers(tmp_path: Path) -> None:
    """Two steps of a GRU, and continuous actions: their mean, from -1 to 1, is 0 to 1 in the world."""
    flags = ["--net.memory", "gru", "--net.memory-width", 5, "--env.actions", "continuous", "--net.hidden", "8,8"]
    run = train(tmp_path / "r", *ALONE, *flags, "--net.gain-actor", 1)
    file, seen, memory = load(run, "agents.1.actor"), observations(run), None
    net, h = file["net"], torch.zeros(5)
    assert net["log_std"].shape == (1, 5)
    for _ in range(2):
        actions, memory = greedy(run, seen, memory)
        body = layers(normal(seen["agent_1"], file["normaliser"]), net).tanh()
        (r, z, n), (r_h, z_h, n_h) = (
            layers(*x).chunk(3) for x in ((body, net, "net.memory.inward."), (h, net, "net.memory.inner."))
        )
        r, z = (r + r_h).sigmoid(), (z + z_h).sigmoid()
        h = (1 - z) * (n + r * n_h).tanh() + z * h
        mean = layers(h, net, "net.out.").clamp(-1, 1)
        torch.testing.assert_close(torch.as_tensor(actions["agent_1"]), (mean + 1) / 2, rtol=1e-4, atol=1e-5)
        assert mean.abs().max() > 0.05


def test_a_slice_of_a_net_is_the_net_of_that_agent() -> None:
    """Of every part that agents may have of their own: perceptrons, scales, memory, attention, convolutions, deviations."""
    names, box = ("x", "y", "z"), Box((-1.0,) * 2, (1.0,) * 2)
    pictures = Group("a", "a", names, {"image": (3, 12, 12), "more": (4,)}, Discrete(3))
    entities = Group("a", "a", names, (6,), box, layout=(Slots("other", 2, 2, 2),))
    generator = torch.Generator().manual_seed(0)
    cases: list[tuple[Group, dict[str, Any]]] = [(pictures, {"layer_norm": True}), (entities, {"memory": "lstm"})]
    for group, more in cases:
        net, attends = NetConfig(hidden=(8, 8), share="none", attention_width=8, heads=2, **more), group is entities
        wide, alone = (
            Actor(Encoder(g, g.agents, net, generator, attends), g.action, g.agents, net, generator)
            for g in (group, replace(group, agents=("x",)))
        )
        for p in wide.parameters():
            p.data.normal_(generator=generator)
        x: Any = torch.randn(5, 3, 6, generator=generator)
        x = x if attends else {"": x[..., :4], "image": torch.randn(5, 3, 3, 12, 12, generator=generator)}
        state = {k: torch.randn(5, 3, 64, generator=generator) for k in ("hidden", "cell")} if attends else None
        out = wide.unroll(x, None, state)[0]
        for i in range(3):
            alone.load_state_dict(of_agent(wide, i))
            mine, before = tree_map(lambda t, i=i: t[:, i : i + 1], (x, state))
            own = alone.unroll(mine, None, before)[0]
            torch.testing.assert_close(out.log_prob(out.mode())[:, i], own.log_prob(own.mode())[:, 0])
            torch.testing.assert_close(out.mode()[:, i], own.mode()[:, 0])


def each(*nets: str, n: int = 3) -> set[str]:
    return {f"agents.{i}.{k}" for i in range(n) for k in nets}


TARGETS, CRITICS, TALKERS = ("actor", "target_actor"), ("critic", "target_critic"), ("speaker.0", "listener.0")
CASES: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("iddpg", "simple_spread", {}, each(*TARGETS, *CRITICS)),
    ("qmix", "simple_spread", {}, each("values", "target_values") | {"agents.mixer", "agents.target_mixer"}),
    ("vdn", "simple_speaker_listener", {}, {f"{g}.{k}" for g in TALKERS for k in ("values", "target_values")}),
    ("vdn", "simple_speaker_listener", {"share": "id"}, {"speaker+listener.values", "speaker+listener.target_values"}),
    ("coma", "simple_speaker_listener", {}, {f"{g}.{k}" for g in TALKERS for k in ("actor", *CRITICS)}),
    ("ippo", "probe_image", {}, {"agents.actor", "agents.critic"}),  # one agent
    ("maddpg", "simple_spread", {"share": "id"}, {"agents.actor", "agents.target_actor"} | each(*CRITICS)),  # pay differs
    ("ippo", "simple_spread", {"share": "agent_0=a,agent_1=b,agent_2=c"}, {"agents.actor", "agents.critic"}),
    ("ippo", "simple_spread", {"module": "test_nets_apart:Counts"}, {"agents.actor", "agents.critic"}),
    ("ddqn", "CartPole-v1", {}, {"agents.values", "agents.target_values"}),
]


@pytest.mark.parametrize(("algo", "env", "net", "files"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_which_files_there_are(algo: str, env: str, net: dict[str, Any], files: set[str]) -> None:
    spec, entry = shoal.make(env).spec, find("algos", algo)
    spec = replace(spec, common=entry.load().reward == "common")
    groups, how = tuple(g.name for g in spec.groups), NetConfig(**{"hidden": (8,), "share": "none", **net})
    config = entry.load().Config(**entry.settings)
    found = net_files(entry.load()(Seat(spec, groups, config, how, torch.Generator().manual_seed(0))))
    assert set(found) == files
    for name, file in found.items():
        place, *rest = name.split(".")
        own = [[spec[place].agents[int(rest[0])]]] if len(rest) == 2 else [[a for g in spec.groups for a in g.agents]]
        assert [file["agents"]] == own
        assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in file["net"].values())
        assert {k.partition(".")[0] for k in file["normaliser"]} <= {"observations", "state_observations", "value_norm"}
