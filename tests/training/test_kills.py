"""A run that is killed (SIGKILL) fifty times at random moments equals one that never was: every tensor, metric and line of
the log but for times. Processes are forked from a server that has loaded Shoal, so that a start takes little."""

import multiprocessing
import random
import re
import signal
import sys
import time
from collections import Counter

import pytest
import torch
from processes import wait_for
from test_options_resume import differing, leaves
from test_replay_resume import saved_ring

from shoal.cli import main
from shoal.training.run import Run

KILLS = 25
STEPS = 6000
COMMON = (
    f"--steps {STEPS} --envs 4 --seed 3 --quiet --net.hidden 8 --env.max-cycles 5 --eval.every 300 --eval.episodes 2 "
    "--log.every 60 --log.tensorboard false"
)
LEARNERS = {  # each saves every other iteration, now and then where it logs and evaluates too
    "ippo": "--algo.rollout 5 --save.every 40 --algo.epochs 1 --algo.minibatches 2 --algo.normalise-obs true --net.memory gru",
    "ddqn": "--algo.rollout 3 --save.every 24 --algo.every 24 --algo.batch 4 --algo.capacity 400 --algo.learning-starts 24 "
    "--algo.prioritised true",
}


def command(words):
    sys.exit(main(words))


def kill_at_random(out, words, kills, rng):
    """Begin, and go on after every kill: at random after its first checkpoint, or now and then while it starts; perhaps as
    soon as a file is being written; in any case before it is too far for the kills to come. Returns where they fell."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["__main__", "shoal.api", "shoal.training.loop"])
    last, fell = out / "checkpoints" / "last.pt", Counter()

    def newest():
        return max((int(p.stem[5:]) for p in last.parent.glob("step-*.pt")), default=-1)

    for k in range(kills):
        before, most = newest(), STEPS * (k + 1) // (kills + 1)
        process = server.Process(target=command, args=(["resume", str(out), "--quiet"] if k else words,))
        process.start()
        if k == 0 or k % 4:
            assert wait_for(lambda before=before: newest() > before, pause=0.001)
        aim = rng.choice(["*.part", "replay/*.part", "no such file"])
        until = time.monotonic() + rng.uniform(0, 0.3)
        while time.monotonic() < until and newest() < most and not list(last.parent.glob(aim)):
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"it ended before kill {k}"
        fell["while saving" if list(last.parent.rglob("*.part")) else "later" if newest() > before else "while starting"] += 1
    return fell


def told(run):
    """All that a run wrote but times, its own folder's name, and how its replay is cut into files."""
    last = run.load("last")
    out = {
        **leaves([{k: v for k, v in line.items() if k != "time"} for line in run.metrics], "/metrics"),
        **saved_ring(run, last),
    }
    last.get("replay", {}).pop("spans", None)
    kept = {p.name: run.load(p.stem) for p in run.checkpoints.glob("*.pt") if p.stem != "last"}
    passing = ("/seconds", "/logs/metrics.jsonl", "/logs/train.log")
    out |= {k: x for k, x in leaves({"last": last, **kept}).items() if not k.endswith(passing)}
    log = re.sub(r"<\d\d:\d\d:\d\d>", "<>", (run.path / "train.log").read_text()).replace(str(run.path), "")
    out |= leaves([line for line in log.splitlines() if not line.startswith("Date: ")], "/log")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", LEARNERS)
def test_no_kill_changes_anything(tmp_path, capsys, algorithm):
    words = ["train", algorithm, "simple_spread", *f"{LEARNERS[algorithm]} {COMMON}".split(), "--out"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    fell = kill_at_random(tmp_path / "killed", [*words, str(tmp_path / "killed")], KILLS, random.Random(0))
    at = Run(tmp_path / "killed").load("last")["step"]
    with capsys.disabled():
        print(f"\n{algorithm}: {KILLS} kills, the last at step {at:,}: {dict(fell)}")
    assert main(["resume", str(tmp_path / "killed"), "--quiet"]) == 0
    whole, killed = told(Run(tmp_path / "whole")), told(Run(tmp_path / "killed"))
    assert sum(isinstance(x, torch.Tensor) for x in whole.values()) > 60
    assert sum(k.startswith("/metrics") for k in whole) > 1000
    assert differing(whole, killed) == []
    assert not list((tmp_path / "killed").rglob("*.part"))
