"""Whole runs as jobs of a real SLURM: `slurm_cluster` brings one up."""

import os
import re
import signal
import time

import pytest
import slurm_cluster
from trainer import checkpoints
from workflow import CHECKOUT, adapter, project


@pytest.fixture(scope="module")
def cluster():
    if reason := slurm_cluster.impossible():
        pytest.skip(reason)
    slurm_cluster.up()
    yield slurm_cluster
    slurm_cluster.down()


# The shortest limit that SLURM knows, a minute; looking at limits twice a minute, it sends the signal in the first 29
# to 59 seconds. Jobs are asked for after 1, 12, 33, ... seconds.
SLURM = (
    *("--profile", str(CHECKOUT / "profiles" / "slurm"), "--slurm-status-command", "squeue"),
    *("--slurm-init-seconds-before-status-checks", "1", "--latency-wait", "10", "--slurm-no-account"),
    *("--set-resources", "train:runtime=1", "train:slurm_extra=--signal=URG@1"),
)


def jobs(cluster):
    """What SLURM knows of each job since it came up: its rule, restarts, times and what it asked for."""
    found = []
    for line in cluster.output("scontrol", "show", "job", "--oneliner").splitlines():
        values = dict(re.findall(r"(\w+)=(\S*)", line))
        rule = re.search(r"Comment=rule_([a-z_]+?)(_wildcards\S*)?( |$)", line)
        found.append(values | {"rule": rule[1] if rule else None})
    return found


def one(cluster, rule):
    """The newest job of a rule."""
    return [job for job in jobs(cluster) if job["rule"] == rule][-1]


def wait_for(what, seconds=300):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.3)


def step(made):
    """The step of the saved state."""
    file = made.run / "checkpoints" / "state.safetensors"
    return checkpoints.read_meta(file)["step"] if file.exists() else 0


def test_a_run_outlives_its_node_its_time_limit_and_preemption_and_ends_in_the_bytes_of_a_local_one(
    tmp_path, models, cluster
):
    # What makes training slow here, and changes nothing in the result: the local run has to do as many steps.
    slowly = {"save_every": 1, "log_every": 1, "keep_every": 1, "keep_last": 1}
    made = project(tmp_path / "slurm", models, steps=10**6, val_every=10**6, decay_fraction=0.1, **slowly)
    made.options = SLURM
    made.write(precompute={"block_shards": 4})  # a job for train, one for val, one for probe
    log = made.run / "logs" / "train.log"

    def trains():
        return "train" in made.control("running")

    def goes_on():
        before = step(made)
        wait_for(lambda: trains() and step(made) > before + 3)

    process = made.start()
    try:
        wait_for(lambda: step(made) > 3, 180)
        blocks = [job for job in jobs(cluster) if job["rule"] == "precompute_block"]
        assert len(blocks) == 3
        one_block, other, _ = sorted(blocks, key=lambda job: job["StartTime"])
        assert other["StartTime"] < one_block["EndTime"]  # each has its own GPU
        on_gpu = {job["rule"] for job in jobs(cluster) if "gres:gpu:1" in job.get("TresPerJob", "")}
        assert on_gpu == {"precompute_block", "train"}

        cluster.crash_node()
        wait_for(lambda: one(cluster, "train")["JobState"] == "PENDING")
        cluster.start_node()
        goes_on()
        assert one(cluster, "train")["Restarts"] == "1"

        wait_for(lambda: log.exists() and "in the queue again" in log.read_text())
        goes_on()
        assert one(cluster, "train")["Restarts"] == "2"

        urgent = cluster.output(
            "sbatch", "--parsable", "--partition=urgent", "--gpus=2", "--output=/dev/null", "--wrap", "sleep 1"
        )
        wait_for(lambda: one(cluster, "train")["Restarts"] == "3")
        goes_on()
        assert next(job for job in jobs(cluster) if job["JobId"] == urgent)["JobState"] == "COMPLETED"

        assert "stopped: train" in made.control("stop")
        wait_for(lambda: not cluster.output("squeue", "--noheader"))
        assert one(cluster, "train")["JobState"] == "FAILED"  # and stays so
    finally:
        os.killpg(process.pid, signal.SIGINT)
        output = process.output(300)
    assert "stopped" in log.read_text(), output  # at a step, or before the next try began

    made.write(train={"steps": int(step(made) * 1.25)})
    made.snakemake()
    assert made.planned() == {}

    local = project(tmp_path / "local", models, **made.settings["train"] | dict.fromkeys(slowly, 10**6))
    local.snakemake()
    assert adapter(made) == adapter(local)
