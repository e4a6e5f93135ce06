"""A real SLURM of one node for tests: munged, slurmctld and slurmd as root, and stand-ins for two GPUs.

By hand: `python tests/slurm_cluster.py up`, then any SLURM command, and `python tests/slurm_cluster.py down`.

The configuration has to be /etc/slurm, because the executor plugin takes SLURM_CONF from what its jobs start; a machine
that has one of its own is left alone. There are no cgroups and no accounting database, so that jobs are followed with
squeue. GPUs are scheduled by count only: a job gets a CUDA_VISIBLE_DEVICES, and no GPU behind it.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

FOLDER = Path("/var/tmp/gguf-trainer-slurm")
CONFIGURATION = Path("/etc/slurm")
PACKAGES = ["slurm-wlm", "munge"]
# Seconds that a node may be silent until its jobs are put back into the queue.
SILENCE = 8

SLURM_CONF = """\
# Written by gguf-trainer's tests.
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
# A job that was put back waits until its credential has expired: 2 minutes, unless told otherwise.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/slurmctld
SlurmdSpoolDir={folder}/slurmd
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout={silence}
KillWait=10
MinJobAge=600
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
# More CPUs and memory than the machine has: the jobs are tiny, and ask for what those of real packs need.
NodeName={host} NodeAddr=127.0.0.1 CPUs=64 RealMemory=200000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=urgent Nodes={host} MaxTime=INFINITE PriorityTier=10
"""


def impossible() -> str | None:
    """Why there can be no SLURM here; None if there can."""
    if os.geteuid() != 0:
        return "bringing up SLURM needs root"
    if _foreign():
        return f"this machine has a SLURM of its own ({CONFIGURATION})"
    if not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        if not shutil.which("apt-get"):
            return "SLURM is not installed, and there is no apt-get to install it with"
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
        for command in (["apt-get", "update", "-qq"], install):
            done = subprocess.run(command, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, capture_output=True)
        if done.returncode:
            return f"{' and '.join(PACKAGES)} could not be installed: {done.stderr.decode()[-300:]}"
    return None


def up() -> None:
    """Start it afresh."""
    down()
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in ("slurmctld", "slurmd"):
        (FOLDER / name).mkdir(parents=True)
    CONFIGURATION.mkdir(exist_ok=True)
    host = socket.gethostname().split(".")[0]
    text = SLURM_CONF.format(host=host, folder=FOLDER, silence=SILENCE)
    (CONFIGURATION / "slurm.conf").write_text(text)
    for number in range(2):
        os.mknod(FOLDER / f"gpu{number}", 0o600 | 0o020000, os.makedev(1, 3))  # the same device as /dev/null
    gres = f"NodeName={host} Name=gpu File={FOLDER}/gpu[0-1] Flags=nvidia_gpu_env\n"
    (CONFIGURATION / "gres.conf").write_text(gres)
    key = FOLDER / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    places = {"key-file": key.name, "socket": "munge.socket", "pid-file": "munged.pid"}
    places |= {"log-file": "munged.log", "seed-file": "munge.seed"}
    _start("munged", "--force", *(f"--{option}={FOLDER / name}" for option, name in places.items()))
    _start("slurmctld")
    start_node()


def start_node() -> None:
    """Start the node's daemon and wait until the node takes jobs."""
    _start("slurmd")
    deadline = time.monotonic() + 300
    while not output("sinfo", "-h", "-o", "%T").startswith(("idle", "mixed", "allocated")):
        if time.monotonic() > deadline:
            raise RuntimeError((FOLDER / "slurmctld.log").read_text()[-3000:])
        time.sleep(0.2)


def crash_node() -> None:
    """Kill the node's daemon and everything that it started, as when a machine loses its power."""
    _kill_tree(int((FOLDER / "slurmd.pid").read_text()), *_stepds())


def down() -> None:
    """Stop it, and what it still runs."""
    for name in ("slurmctld", "slurmd", "munged"):
        file = FOLDER / f"{name}.pid"
        if file.exists() and _command(int(file.read_text())).startswith(name):
            _kill_tree(int(file.read_text()))
    _kill_tree(*_stepds())
    if not _foreign():
        for name in ("slurm.conf", "gres.conf"):  # without a controller, every SLURM command would wait for one
            (CONFIGURATION / name).unlink(missing_ok=True)


def output(*command: str) -> str:
    """What a SLURM command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _foreign() -> bool:
    """Whether there is a configuration that is not ours."""
    file = CONFIGURATION / "slurm.conf"
    return file.exists() and "gguf-trainer's tests" not in file.read_text()


def _start(*command: str) -> None:
    # Not with our stdout: whoever captures it would wait for the daemons.
    with open(FOLDER / "start.log", "ab") as log:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _stepds() -> list[int]:
    """The processes that hold the node's job steps; they outlive its daemon."""
    processes = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in processes if _command(pid).startswith("slurmstepd")]


def _kill_tree(*parents: int) -> None:
    """kill -9 of processes and all below them."""
    for parent in parents:
        try:
            process = psutil.Process(parent)
            below = process.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
        for it in (process, *below):
            try:
                it.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue


if __name__ == "__main__":
    if sys.argv[1:] == ["down"]:
        down()
    elif reason := impossible():
        sys.exit(reason)
    else:
        up()
        print(output("sinfo", "-N", "-o", "%N %P %T %c cpus %m MB %G"))
