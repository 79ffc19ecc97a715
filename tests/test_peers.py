"""The comparison with peers: its protocol with fakes that need no peer, its table and JSON, and what it says when it cannot."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks" / "peers"
SCRIPT = FOLDER / "run.py"
PACKAGES = (
    "jax",
    "jaxmarl",
    "flax",
    "xuance",
    "skrl",
    "stable_baselines3",
    "supersuit",
    "benchmarl",
    "torchrl",
    "vmas",
    "torch",
)
WORK = {
    **{"algo": "ippo", "rows": 4, "steps": 5, "hidden": [64, 64], "epochs": 1, "minibatches": 1, "device": "cpu"},
    **{"threads": 1, "precision": "float32", "jaxmarl": None, "path": []},
}
QMIX = {**WORK, "algo": "qmix", "batch": 32, "every": 10, "part": "train"}
MADDPG = {**QMIX, "algo": "maddpg"}


def load(file):
    spec = importlib.util.spec_from_file_location(f"peers_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


run = load(SCRIPT)

FAKE = """
import os, time
INSTALL = ()
def refuse(work):
    return None
def prepare(work):
    print("peers print what they like")
    os.system("echo and so do their children")
    def piece():
        time.sleep({pause})
        with open({trace!r}, "a") as f:
            f.write({name!r})
        return work.rows * work.steps
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else work.threads
    described = {{"versions": {{{name!r}: "1"}}, "precision": "float32", "threads": cores}}
    return {{**described, "measured": "naps", "differs": ["it naps"]}}, piece
"""
DESCRIPTION = {"versions": {"a": "1"}, "precision": "float32", "threads": 1, "measured": "naps", "differs": ["it naps"]}


@pytest.fixture
def fakes(tmp_path):
    """Two sides: one naps 10 ms for 20 steps, the other 30 ms."""

    def make(name, pause, text=FAKE):
        file = tmp_path / f"{name}.py"
        file.write_text(text.format(pause=pause, name=name, trace=str(tmp_path / "trace")))
        return run.Side(name, file, sys.executable)

    return make


def command(*words):
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr.strip()


def test_sides_take_turns_and_are_counted(fakes, tmp_path):
    fast, slow = fakes("a", 0.01), fakes("b", 0.03)
    run.compare([fast, slow], WORK, repeats=3, seconds=0.1)
    turns = (tmp_path / "trace").read_text()
    blocks = "".join(c for i, c in enumerate(turns) if i == 0 or turns[i - 1] != c)
    assert blocks == "ab" + "ababab"  # a piece of each to warm up, then the repeats
    assert len(fast.rates) == len(slow.rates) == 3
    for side, pause in ((fast, 0.01), (slow, 0.03)):
        assert side.error is None
        assert all(0.1 * 20 / pause < rate <= 20 / pause for rate in side.rates)
        assert side.description["versions"] == {side.name: "1"}
        assert side.description["threads"] == 1  # kept on one core
        assert side.process is None


def test_a_side_that_fails_is_named_and_the_others_go_on(fakes):
    good = fakes("a", 0.01)
    raises = fakes("b", 0, "def prepare(work):\n    raise ValueError('no such\\n  thing')\n")
    dies = fakes(
        "c", 0, "import os, sys\ndef prepare(work):\n    print('last words', file=sys.stderr, flush=True)\n    os._exit(3)\n"
    )
    run.compare([good, raises, dies], WORK, repeats=1, seconds=0.02)
    assert (len(good.rates), raises.rates, dies.rates) == (1, [], [])
    assert raises.error == "ValueError: no such thing"
    assert dies.error == "it ended without an answer: last words"


def test_a_side_that_waits_uses_no_cpu(fakes):
    waits, works = fakes("a", 0.001), fakes("b", 0.001)
    run.compare([waits, works], WORK, repeats=2, seconds=0.4)
    assert waits.idle < 0.1


def side(name, rates, error=None):
    description = {} if error else {**DESCRIPTION, "versions": {name: "1"}}
    return run.Side(name, Path(f"{name}.py"), "python", description=description, rates=rates, error=error)


def test_medians_spread_and_ratios():
    ours, peer, broken = side("shoal", [90.0, 100.0, 200.0]), side("peer", [45.0, 25.0, 20.0]), side("broken", [], "it broke.")
    r = run.summary(peer, ours)
    assert (r["median"], r["lowest"], r["highest"]) == (25.0, 20.0, 45.0)
    assert r["ratio"] == 4.0  # 100 / 25
    assert (r["ratio_lowest"], r["ratio_highest"]) == (2.0, 10.0)  # 90 / 45 and 200 / 20, repeat by repeat
    assert "ratio" not in run.summary(ours, ours)
    assert "median" not in run.summary(broken, ours)

    sides = {s.name: run.summary(s, ours) for s in (ours, peer, broken)}
    result = {"settings": {"seconds": 4.0}, "sizes": [{"rows": 16, "steps": 128, "sides": sides}]}
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in run.table(result).splitlines()]
    assert cells[0] == list(run.COLUMNS)
    assert cells[2:] == [
        ["16x128", "shoal", "100", "90", "200", "-"],
        ["16x128", "peer", "25", "20", "45", "4.00 (2.00 to 10.00)"],
        ["16x128", "broken", "-", "-", "-", "not measured"],
    ]
    said = run.notes(result)
    assert "broken, 16x128: not measured: it broke." in said
    assert "peer: peer 1; float32, threads 1; naps" in said
    assert "peer: it naps" in said
    json.dumps(result)

    result["settings"]["part"] = "update"
    assert "| updates/s (median) |" in run.table(result).splitlines()[0]


def test_numbers_are_short():
    assert [run.short(x) for x in (7.77, 999, 2047, 16_123, 123_456, 7_654_321)] == [
        "7.77",
        "999",
        "2.05k",
        "16.1k",
        "123k",
        "7.65M",
    ]


def test_shoal_alone_writes_the_whole_result(tmp_path):
    file = tmp_path / "result.json"
    words = ["--peers", "", "--sizes", "4x5,8x5", "--minibatches", "2", "--epochs", "1", "--repeats", "2", "--seconds", "0.05"]
    code, out, err = command(*words, "--hidden", "8,8", "--json", str(file))
    assert code == 0, err
    result = json.loads(file.read_text())
    assert [(size["rows"], size["steps"]) for size in result["sizes"]] == [(4, 5), (8, 5)]
    for size in result["sizes"]:
        ours = size["sides"]["shoal"]
        assert len(ours["rates"]) == 2
        assert ours["lowest"] <= ours["median"] <= ours["highest"]
        assert ours["description"]["versions"]["torch"]
    assert result["settings"]["threads"] == 1
    assert out.count("| shoal |") == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--peers", "nobody"], "there is no peer 'nobody': --peers takes benchmarl, jaxmarl, sb3, skrl, xuance."),
        (["--peers", "jaxmarl"], "--jaxmarl FOLDER."),
        (["--peers", "jaxmarl", "--jaxmarl", "nowhere"], "nowhere is no checkout of JaxMARL"),
        (["--peers", "sb3", "--algo", "mappo"], "sb3 has no central critic: --algo ippo."),
        (["--peers", "skrl", "--rows", "1"], "--rows must be 2 or more."),
        (["--peers", "", "--sizes", "16,128"], "--sizes is '16,128': it takes rows x steps"),
        (["--peers", "", "--hidden", "big"], "--hidden is 'big'"),
        (["--peers", "", "--rows", "0"], "must be more than zero."),
        (["--peers", "", "--algo", "qmix", "--every", "0"], "must be more than zero."),
        (["--peers", "", "--part", "update"], "--part update is for --algo qmix and maddpg: ippo is measured end to end."),
        (["--peers", "benchmarl", "--algo", "qmix"], "benchmarl's QMIX is not compared here: --algo ippo or mappo."),
        (["--peers", "jaxmarl", "--algo", "qmix"], "jaxmarl's QMIX is recurrent, and these nets are not, and it has no MADDPG"),
        (["--peers", "sb3", "--algo", "qmix"], "sb3 has no QMIX: --algo ippo."),
        (["--peers", "skrl", "--algo", "qmix"], "skrl has no QMIX: --algo ippo or mappo."),
        (["--peers", "skrl", "--algo", "maddpg"], "skrl has no MADDPG: --algo ippo or mappo."),
        (["--peers", "", "--precision", "tf32"], "--precision tf32 is a GPU's"),
        (["--peers", "", "--python", "sb3=python3"], "it takes SIDE=PATH, where a side is one of shoal."),
        (
            ["--peers", "skrl", "--python", "skrl=/no/such/python"],
            "--python skrl=/no/such/python: there is no such interpreter.",
        ),
    ],
)
def test_errors_are_one_sentence(words, says):
    code, out, err = command(*words, "--repeats", "1", "--seconds", "0.01")
    last = err.splitlines()[-1]
    assert code == 1
    assert last.startswith("error: ")
    assert says in last
    assert "Traceback" not in err
    assert out == ""


def test_a_missing_environment_says_install(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    with pytest.raises(run.UsageError, match=r"skrl has no environment in \.peers.skrl: run this with --install first\."):
        run.main(["--peers", "skrl"])
    assert run.interpreter("skrl", {"skrl": "sh"}, False) == "sh"
    assert run.interpreter("skrl", {}, True) == sys.executable


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda f: f.stem)
def test_files_import_without_their_packages(file):
    """In an interpreter where every peer's package is barred."""
    code = f"""
import importlib.util, sys
sys.modules.update(dict.fromkeys({PACKAGES!r}))
sys.path = [p for p in sys.path if "site-packages" not in p]
spec = importlib.util.spec_from_file_location("peer", {str(file)!r})
sys.modules["peer"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["peer"])
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(run.known_peers()))
def test_a_peer_says_what_it_installs_and_takes_the_common_work(name):
    peer = run.load(run.known_peers()[name])
    assert all(isinstance(word, str) for words in peer.INSTALL for word in words)
    assert peer.INSTALL
    common = run.SimpleNamespace(**{**WORK, "rows": 16, "steps": 128, "epochs": 4, "minibatches": 4})
    why = peer.refuse(common)
    assert why is None if name != "jaxmarl" else "checkout" in why


def test_limits_are_the_same_for_every_side():
    one, two, free = (run.environment(threads) for threads in (1, 2, 0))
    assert (one["OMP_NUM_THREADS"], two["OMP_NUM_THREADS"]) == ("1", "2")
    assert "intra_op_parallelism_threads=1" in one["XLA_FLAGS"]
    assert free.get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS")
    assert {e["XLA_PYTHON_CLIENT_PREALLOCATE"] for e in (one, two, free)} == {"false"}


def test_a_worker_answers_in_lines(fakes):
    """The protocol itself, spoken by hand."""
    worker = subprocess.Popen(
        [sys.executable, str(FOLDER / "worker.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def ask(**message):
        worker.stdin.write(json.dumps(message) + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    assert "measure comes after prepare" in ask(verb="measure", seconds=0.01)["error"]
    ready = ask(verb="prepare", file=str(fakes("a", 0.01).file), work=WORK)["ready"]
    assert ready["measured"] == "naps"
    began = time.perf_counter()
    answer = ask(verb="measure", seconds=0.1)
    assert answer["steps"] % 20 == 0
    assert 0.1 <= answer["seconds"] <= time.perf_counter() - began
    worker.stdin.write('{"verb": "quit"}\n')
    worker.stdin.flush()
    assert worker.wait(10) == 0
    worker.stdin.close()
    worker.stdout.close()


# --- QMIX ---


@pytest.fixture
def one_thread(monkeypatch):
    """Sides set how many threads and what precision torch takes: not of the process that tests them."""
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda name: None)


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ([], {"epochs": 4, "minibatches": 4}),
        (["--algo", "qmix"], {"batch": 256, "every": 25, "part": "train"}),
        (["--algo", "maddpg"], {"batch": 256, "every": 25, "part": "train"}),
        (["--algo", "qmix", "--batch", "64", "--every", "8", "--part", "update"], {"batch": 64, "every": 8, "part": "update"}),
    ],
)
def test_some_have_a_replay(words, own, monkeypatch, tmp_path):
    works = []
    monkeypatch.setattr(run, "compare", lambda sides, work, *rest: works.append(work))
    assert run.main(["--peers", "", *words, "--json", str(tmp_path / "result.json")]) == 0
    settings = json.loads((tmp_path / "result.json").read_text())["settings"]
    keys = ("epochs", "minibatches", "batch", "every", "part")
    assert {k: v for k, v in settings.items() if k in keys} == own
    assert [{k: work[k] for k in own} for work in works] == [own]
    assert ("batch" in works[0]) == (settings["algo"] in ("qmix", "maddpg"))


@pytest.mark.parametrize("work", [WORK, QMIX, {**QMIX, "part": "update"}, MADDPG], ids=["ippo", "qmix", "updates", "maddpg"])
def test_shoal_is_asked_for_the_same_work(work, monkeypatch, one_thread):
    import shoal.tools.bench as bench

    asked = []
    monkeypatch.setattr(bench, "TrainBench", SimpleNamespace)
    monkeypatch.setattr(bench, "trainer", lambda *args: asked.append(args) or "piece")
    monkeypatch.setattr(sys, "path", [*sys.path])
    description, piece = run.load(FOLDER / "shoal_side.py").prepare(SimpleNamespace(**work))
    [(algo, env, options, _, _, part)] = asked
    assert (algo, env, part, piece) == (work["algo"], "simple_spread", work.get("part", "train"), "piece")
    assert (options.rows, options.rollout, options.hidden) == (4, 5, (64, 64))
    replay = {k: v for k, v in vars(options).items() if k in ("batch", "every")}
    assert replay == ({} if algo == "ippo" else {"batch": 32, "every": 10})
    assert getattr(options, "actions", None) == ("continuous" if algo == "maddpg" else None)  # XuanCe's has no other
    assert ("advantages" in description["measured"]) == (algo == "ippo")


class FakeAgents:
    """Counts steps and updates by XuanCe's rule: it looks before it adds a step of every row."""

    def __init__(self, config, envs):
        self.config, self.step, self.updates = config, 0, 0
        self.memory = SimpleNamespace(size=0)
        assert config.buffer_size % config.parallels == 0  # it refuses others

    def train(self, turns):
        for _ in range(turns):
            self.memory.size += 1
            if self.step >= self.config.start_training and self.step % self.config.training_frequency == 0:
                self.train_epochs(self.config.n_epochs)
            self.step += self.config.parallels

    def train_epochs(self, times):
        self.updates += times


@pytest.fixture
def xuance(monkeypatch, one_thread):
    """Its file, over a package of fakes; `made` are the agents."""
    made = []
    parts = {name: ModuleType(name) for name in ("xuance", "xuance.common", "xuance.environment", "xuance.torch.agents")}
    parts["xuance"].__version__ = "v0"
    parts["xuance.torch"] = ModuleType("xuance.torch")
    parts["xuance.common"].get_arguments = lambda algo, env, task, parser_args: Namespace(agent=algo, **vars(parser_args))
    parts["xuance.environment"].make_envs = lambda config: None
    make = lambda config, envs: made.append(FakeAgents(config, envs)) or made[-1]  # noqa: E731
    parts["xuance.torch.agents"].REGISTRY_Agents = {"ippo": make, "qmix": make, "maddpg": make}
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(peer=run.load(FOLDER / "xuance.py"), made=made)


@pytest.mark.parametrize(("rows", "every"), [(16, 25), (25, 25), (5, 25), (8, 4), (7, 3), (1, 10)])
def test_xuance_updates_once_each_so_many_steps(xuance, rows, every):
    _, piece = xuance.peer.prepare(SimpleNamespace(**{**QMIX, "rows": rows, "steps": 30, "every": every}))
    [agents] = xuance.made
    for _ in range(3):
        before = agents.step, agents.updates
        steps = piece()
        assert steps == agents.step - before[0] >= 30 * rows
        assert steps == every * (agents.updates - before[1])


def test_xuance_updates_alone_take_no_steps(xuance):
    description, piece = xuance.peer.prepare(SimpleNamespace(**{**QMIX, "part": "update"}))
    [agents] = xuance.made
    before = agents.step, agents.updates
    assert agents.step >= 10_000
    assert (piece(), agents.step, agents.updates) == (20, before[0], before[1] + 20)
    assert "a replay of 10000 transitions" in description["measured"]


def test_xuance_has_the_nets_of_the_work(xuance):
    for work in (WORK, QMIX, MADDPG):
        xuance.peer.prepare(SimpleNamespace(**{**work, "hidden": [128, 64, 32]}))
    ppo, qmix, maddpg = (agents.config for agents in xuance.made)
    assert (ppo.representation_hidden_size, ppo.actor_hidden_size, ppo.activation) == ([128, 64], [32], "tanh")
    assert (qmix.representation_hidden_size, qmix.q_hidden_size, qmix.activation) == ([128, 64], [32], "relu")
    assert (qmix.batch_size, qmix.use_parameter_sharing, qmix.use_rnn) == (32, True, False)
    assert (qmix.hidden_dim_mixing_net, qmix.hidden_dim_hyper_net) == (32, 64)
    assert (maddpg.actor_hidden_size, maddpg.critic_hidden_size, maddpg.activation) == ([128, 64, 32], [128, 64, 32], "relu")
    assert (maddpg.batch_size, maddpg.use_parameter_sharing, maddpg.continuous_action) == (32, True, True)
