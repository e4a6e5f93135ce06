"""The dashboard: what it shows in a real browser, what it does when asked, and what it refuses."""

import http.client
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import browser
import finished_run
import pytest
import yaml
from trainer import commands, config
from trainer.errors import TrainerError

pytest.importorskip("nicegui", reason="the dashboard's packages are not installed")
from trainer.dashboard import guard, readings
from trainer.dashboard.actions import Actions

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "dashboard.py"
HOSTILE = "</script><script>document.title='run'</script> `${document.title='run'}` <img src=x onerror=alert(1)>"


@dataclass
class Server:
    """A dashboard in a process of its own."""

    process: subprocess.Popen
    runs: Path
    port: int
    token: str | None
    answers: list[bytes] = field(default_factory=list)

    @property
    def origin(self):
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method, path, headers=None, body=None):
        """Status, headers and text of an answer; the path and the headers are sent as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.putrequest(method, path, skip_host=True)
        for name, value in ({"Host": f"127.0.0.1:{self.port}"} | (headers or {})).items():
            for one in value if isinstance(value, list) else [value]:
                connection.putheader(name, one)
        body = json.dumps(body).encode() if body is not None else b""
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        self.answers.append(str(answer.headers).encode() + content)
        return answer.status, answer.headers, content.decode()

    def post(self, path, body=None, **other):
        """As the page asks: with its origin and the token, or what is given instead."""
        headers = {"Origin": self.origin, "Authorization": f"Bearer {self.token}"} | other
        status, _, text = self.ask("POST", path, {k: v for k, v in headers.items() if v is not None}, body)
        return status, text


def start(runs, *options):
    """Start a dashboard whose output is a terminal, and wait until it serves."""
    ours, theirs = pty.openpty()
    command = [sys.executable, SCRIPT, runs, "--port", "0", *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=runs.parent)
    os.close(theirs)
    output = b""
    while b"\n" not in output:
        output += os.read(ours, 4096)
    port = int(re.search(rb":(\d+)/", output)[1])
    token = re.search(rb"#token=([\w-]+)", output)
    deadline = time.monotonic() + 300
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert process.poll() is None, os.read(ours, 65536).decode()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server = Server(process, runs, port, token and token[1].decode())
    server.terminal = ours
    return server


def stop(server):
    """End it with Ctrl-C, which is no error."""
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=120) == 0
    output = b""
    try:
        while piece := os.read(server.terminal, 65536):
            output += piece
    except OSError:
        pass  # how a terminal ends
    os.close(server.terminal)
    return output.decode()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run, beside what must not be reached from it."""
    root = tmp_path_factory.mktemp("project")
    folder, settings = finished_run.build(root)
    config.write_stage_settings(settings)
    (folder / "logs").mkdir()
    (folder / "logs" / "train.log").write_text(f"12:00:00  {HOSTILE}\n12:00:01  trained to step 600\n")
    (folder / "logs" / "evaluate.log").write_text("12:00:01  error: the disk was full\n")
    os.utime(folder / "logs" / "train.log", (time.time() + 60,) * 2)  # the newest
    (folder / "report.html").write_text("<title>report</title><script>document.title = 'run'</script>")
    secret = root / "secret"
    (secret / "settings").mkdir(parents=True)
    (secret / "settings" / "run.json").write_text("{}")
    (secret / "report.html").write_text("not to be read")
    (folder.parent / "outside").symlink_to(secret)
    (folder.parent / ".hidden").symlink_to(secret)
    other, settings = finished_run.build(root, run="linked")
    (other / "report.html").symlink_to(secret / "report.html")
    (other / "logs").symlink_to(secret)
    (other / "control").mkdir()
    (other / "control" / "start.out").symlink_to(secret / "report.html")
    config.write_stage_settings(settings)
    return folder.parent


@pytest.fixture(scope="module")
def looking(runs):
    server = start(runs)
    yield server
    assert "Traceback" not in stop(server)


@pytest.fixture(scope="module")
def controlled(runs):
    server = start(runs, "--allow-control")
    yield server
    assert "Traceback" not in stop(server)


@pytest.fixture
def chromium(tmp_path):
    if not browser.CHROMIUM:
        pytest.skip("no Chromium or Chrome in PATH")
    page = browser.Browser(tmp_path / "profile")
    yield page
    page.close()


# -- in a browser ------------------------------------------------------------------------------------------------------

DRAWN = "document.querySelectorAll('.nicegui-echart svg path[stroke=\"#4f86e8\"]').length >= 4"


def test_the_page_of_a_run_shows_all_of_it_from_this_server_alone(looking, chromium):
    chromium(
        "Page.addScriptToEvaluateOnNewDocument",
        source="""
        window.shift = 0;
        new PerformanceObserver(list => list.getEntries().forEach(it => window.shift += it.value))
          .observe({type: "layout-shift", buffered: true});""",
    )
    chromium.open(f"{looking.origin}/", "document.querySelector('tbody tr')")
    assert chromium.value("[...document.querySelectorAll('tbody a')].map(it => it.textContent)") == ["linked", "demo"]
    chromium.value("document.querySelector('tbody tr:last-child a').click()")
    chromium.wait(DRAWN)
    text = chromium.value("document.body.innerText")
    for said in ("4,239/4,239 samples", "0/600 steps", "0.9697", "no NVIDIA GPU" if not readings.gpus() else "GPU"):
        assert said in text
    assert "error: evaluate: the disk was full" in text
    assert "pig_demo_adapter-step400-f16.gguf" in text
    assert HOSTILE in text
    assert chromium.value("document.title") == "demo · gguf-trainer"
    assert chromium.value("[...document.querySelectorAll('h2')].map(it => it.textContent)") == [
        *("Stages", "Running", "Figures", "Curves", "This machine", "Snapshots", "Log")
    ]
    assert not chromium.value("document.querySelector('form')")
    before = chromium.value("document.querySelector('.facts').innerText")
    chromium.wait(f"document.querySelector('.facts').innerText !== {json.dumps(before)}")  # it is live
    assert chromium.value("window.shift") < 0.01
    of_here = (looking.origin, looking.origin.replace("http", "ws"), "data:", "about:")
    assert [url for url in chromium.requests if not url.startswith(of_here)] == []
    assert chromium.complaints == []


def test_it_fits_a_phone_and_follows_light_and_dark(looking, chromium):
    chromium.resize(360, 740, phone=True)
    chromium.open(f"{looking.origin}/run/demo", DRAWN)
    assert chromium.value("document.documentElement.scrollWidth") == 360
    ink = "getComputedStyle(document.querySelector('.nicegui-echart svg text')).fill"
    page = "getComputedStyle(document.body).backgroundColor"
    light = chromium.value(f"[{page}, {ink}]")
    chromium.dark(True)
    chromium.wait(f"{page} !== {json.dumps(light[0])} && {ink} !== {json.dumps(light[1])}")


def test_the_log_is_chosen_with_the_keyboard(looking, chromium):
    chromium.open(f"{looking.origin}/run/demo", DRAWN)
    for _ in range(30):
        chromium.key("Tab")
        if chromium.value("document.activeElement.getAttribute('role')") == "combobox":
            break
    chromium.key("ArrowDown")
    chromium.wait("document.querySelectorAll('[role=option]').length === 3")
    at = "document.getElementById(document.activeElement.getAttribute('aria-activedescendant'))?.innerText"
    while chromium.value(at) != "evaluate":
        chromium.key("ArrowDown")
    chromium.key("Enter")
    chromium.wait("document.querySelector('.lines').innerText.includes('the disk was full')")


def test_a_report_is_shown_without_its_scripts(looking, chromium):
    chromium.open(f"{looking.origin}/run/demo/report.html")
    assert chromium.value("document.title") == "report"


def test_a_gpu_is_told_as_its_tool_tells_it_and_none_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert readings.gpus() == []
    tool = tmp_path / "nvidia-smi"
    lines = "0, NVIDIA X, 97, 1024, 2048, 61, 120.5", "1, NVIDIA Y, [N/A], 0, 0, 40, [N/A]"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    tool.chmod(0o755)
    first, second = readings.gpus()
    assert first["name"] == "GPU 0 NVIDIA X"
    assert (first["used"], first["memory_used"], first["memory_total"]) == (0.97, 1 << 30, 1 << 31)
    assert (second["used"], second["celsius"], second["watts"]) == (None, 40.0, None)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert readings.gpus() == []


def test_a_long_curve_is_drawn_by_means_and_gaps_are_left_out():
    rows = [{"step": str(step), "loss": f"{step}", "val_cos": "" if step % 100 else "0.5"} for step in range(1, 6001)]
    found = readings.curves([*rows, {"step": "6000", "loss": "nan"}, {"step": ""}])
    assert len(found["loss"]) == readings.POINTS
    assert found["loss"][0] == (20, 10.5)
    assert [step for step, _ in found["val_cos"]] == list(range(100, 6000, 100))
    assert found["lr"] == []


# -- asked for ---------------------------------------------------------------------------------------------------------

WORKFLOW = """
rule all:
    output: "started"
    shell: "echo here > {output}"

rule snapshot:
    output: "snapshotted"
    shell: "echo here > {output}"
"""


@pytest.fixture
def asked(controlled, tmp_path):
    """A run with a recorded command, in a folder of its own."""
    (tmp_path / "Snakefile").write_text(WORKFLOW)
    (tmp_path / "my.yaml").write_text("train:\n  steps: 600  # mine\n")
    arguments = ["--snakefile", str(tmp_path / "Snakefile"), "--cores", "1"]
    record(controlled.runs / "demo", tmp_path, arguments, [tmp_path / "my.yaml"])
    yield tmp_path
    (controlled.runs / "demo" / "settings" / "command.json").unlink()


def record(run, folder, arguments, configfiles, steps_given=False):
    values = {"folder": str(folder), "arguments": arguments, "steps_given": steps_given}
    values["configfiles"] = [str(commands.CHECKOUT / "config.yaml"), *map(str, configfiles)]
    (run / "settings" / "command.json").write_text(json.dumps(values))


def appears(path):
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.1)


def test_a_person_with_the_link_starts_a_run_and_changes_its_steps(controlled, asked, chromium):
    chromium.open(f"{controlled.origin}/#token={controlled.token}", "document.querySelector('tbody tr')")
    assert chromium.value("location.href") == f"{controlled.origin}/"
    chromium.open(f"{controlled.origin}/run/demo", DRAWN)
    assert f"snakemake --snakefile {asked}/Snakefile --cores 1" in chromium.value("document.body.innerText")
    chromium.value("document.querySelector('button[name=start]').focus()")
    chromium.key("Enter", "\r")
    chromium.wait("document.querySelector('output').innerText.startsWith('started: snakemake')")
    appears(asked / "started")
    chromium.value("document.querySelector('input[name=number]').focus()")
    chromium.type("900")
    chromium.key("Tab")
    chromium.key("Enter", "\r")
    chromium.wait("document.querySelector('output').innerText.startsWith('train.steps is 900')")
    assert (asked / "my.yaml").read_text() == "train:\n  steps: 900  # mine\n"
    for seen in (chromium.value("document.documentElement.outerHTML"), *chromium.frames, *chromium.requests[1:]):
        assert controlled.token not in seen
    assert chromium.complaints == []


def test_a_wrong_token_is_told_in_the_page(controlled, chromium):
    chromium.open(f"{controlled.origin}/run/demo", DRAWN)
    chromium.value("document.querySelector('input[name=token]').focus()")
    chromium.type("wrong")
    chromium.value("document.querySelector('button[name=stop]').click()")
    chromium.wait("document.querySelector('output').innerText.startsWith('the token is missing or wrong')")


def test_a_snapshot_is_made_and_a_second_one_waits_for_it(controlled, asked):
    assert controlled.post("/run/demo/snapshot")[0] == 200
    status, text = controlled.post("/run/demo/snapshot")
    assert (status, "not done yet" in text) == (409, True)
    appears(asked / "snapshotted")
    assert (controlled.runs / "demo" / "control" / "snapshot.out").exists()


def test_a_job_is_asked_to_stop_as_from_a_terminal(controlled):
    run = controlled.runs / "demo"
    assert controlled.post("/run/demo/stop")[0] == 409
    job = """
import sys, time
from trainer.control import Requests, only_one
requests = Requests(sys.argv[1])
with only_one(sys.argv[1], "train"):
    print(flush=True)
    while not requests.stop():
        time.sleep(0.05)
"""
    command = [sys.executable, "-c", job, str(run)]
    with subprocess.Popen(command, cwd=SCRIPT.parent, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert controlled.post("/run/demo/start")[0] == 409
        assert controlled.post("/run/demo/stop") == (200, '{"done":"train was asked to save and stop"}')
        assert process.wait(timeout=120) == 0


def test_what_was_started_here_and_does_not_save_is_interrupted(runs, asked):
    (asked / "Snakefile").write_text("rule all:\n    output: 'started'\n    shell: 'touch running; sleep 60'\n")
    asking = Actions(readings.Runs(runs))
    asking.do("start", "demo", {})
    appears(asked / "running")
    assert asking.do("stop", "demo", {}) == "demo was interrupted"
    assert asking._started["demo", "start"].wait(timeout=120) != 0
    assert asking.failed("demo", "stopped") == []
    assert "its log says why" in asking.failed("demo", "waiting")[0]


@pytest.mark.parametrize("body", [None, {}, [], {"step": 3}, *({"steps": it} for it in ("9", 0, -1, True, 1e3, None))])
def test_steps_that_are_none_are_refused(controlled, asked, body):
    assert controlled.post("/run/demo/steps", body)[0] in (400, 409)
    assert (asked / "my.yaml").read_text() == "train:\n  steps: 600  # mine\n"


def test_a_run_whose_command_is_not_known_is_not_started(controlled):
    status, text = controlled.post("/run/linked/start")
    assert status == 409
    assert "start it once from a terminal" in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# mine\ntrain: {lr: 1e-3, steps: 5}\n", "# mine\ntrain: {lr: 1e-3, steps: 70}\n"),
        ("train:\r\n  steps: 5 # few\r\n  lr: 1e-3\r\n", "train:\r\n  steps: 70 # few\r\n  lr: 1e-3\r\n"),
        ("train:\n    lr: 1e-3\nrun: a\n", "train:\n    steps: 70\n    lr: 1e-3\nrun: a\n"),
        ("train: {lr: 1e-3}\n", "train: {steps: 70, lr: 1e-3}\n"),
        ("run: größe", "run: größe\ntrain:\n  steps: 70\n"),
        ("train:\n", None),
        ("train: &t {steps: 5}\nother: *t\n", None),
        ("- 1\n", None),
        ("train: [", None),
    ],
)
def test_a_change_of_steps_leaves_the_rest_of_a_settings_file(tmp_path, before, after):
    file = tmp_path / "my.yaml"
    file.write_bytes(before.encode())
    command = commands.Command(str(tmp_path), [], [str(commands.CHECKOUT / "config.yaml"), str(file)], False)
    if after is None:
        with pytest.raises(TrainerError):
            commands.set_steps(command, 70)
    else:
        assert commands.set_steps(command, 70) == file
        assert yaml.safe_load(after)["train"]["steps"] == 70
    assert file.read_bytes() == (after or before).encode()


def test_steps_are_changed_only_where_that_counts_and_never_in_a_pack(tmp_path):
    pack = commands.CHECKOUT / "packs" / "demo" / "pack.yaml"
    base, first, last = commands.CHECKOUT / "config.yaml", tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("train: {steps: 5}\n")
    last.write_text("run: a\n")
    assert commands.set_steps(commands.Command("", [], [base, pack, first, last], False), 7) == first
    assert commands.set_steps(commands.Command("", [], [base, pack, last], False), 7) == last
    with pytest.raises(TrainerError, match="its pack"):
        commands.set_steps(commands.Command("", [], [base, first, pack], False), 7)
    with pytest.raises(TrainerError, match="--config"):
        commands.set_steps(commands.Command("", [], [base, first], True), 7)


@pytest.mark.parametrize(
    ("line", "recorded"),
    [
        ("--profile packs/demo --profile my", True),
        ("--profile=packs/demo --config run=a train={steps:5} --cores 2 --executor slurm -j8", True),
        ("--profile packs/demo --default-resources slurm_account=me --set-resources train:runtime=9", True),
        *(("--profile packs/demo -n", False), ("--profile packs/demo train", False), ("--unlock", False)),
        *(("--nolock snapshot", False), ("--storage-s3-secret-key abc --cores 1", False)),
    ],
)
def test_a_command_is_recorded_if_it_is_for_a_whole_run_and_all_of_it_is_known(tmp_path, monkeypatch, line, recorded):
    monkeypatch.chdir(tmp_path)
    commands.record(tmp_path, line.split(), ["packs/demo/pack.yaml"], {"train": {"lr": 1}})
    if not recorded:
        with pytest.raises(TrainerError, match="no command is recorded"):
            commands.read(tmp_path)
    else:
        found = commands.read(tmp_path)
        assert (found.arguments, found.folder, found.steps_given) == (line.split(), str(tmp_path), False)
        assert found.configfiles == [str(tmp_path / "packs" / "demo" / "pack.yaml")]
        assert shlex.split(found.text())[1:] == line.split()


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("/run/outside", "/run/outside/report.html", "/run/linked/report.html", "/run/.hidden/report.html"),
        *("/run/../secret/report.html", "/run/..%2Fsecret/report.html", "/run/%2e%2e/report.html"),
        *("/run/demo%2F..%2F..%2Fsecret/report.html", "/run/demo/../../secret/report.html", "/run/./report.html"),
        *("/run/%00/report.html", "/run/demo%5C..%5C../report.html", "//run/..%252Fsecret/report.html"),
        "/run/demo/settings/run.json",
    ],
)
def test_nothing_outside_a_run_is_reached(looking, path):
    status, _, text = looking.ask("GET", path)
    assert status == 404
    assert "not to be read" not in text


def test_links_out_of_a_run_are_no_logs(runs):
    found = readings.Runs(runs)
    assert found.names() == ["linked", "demo"]
    assert found.logs("linked") == {}
    assert {"train", "evaluate"} <= set(found.logs("demo"))


@pytest.mark.parametrize("host", ["evil.example", "evil.example:PORT", "127.0.0.1", "", ["127.0.0.1:PORT"] * 2])
@pytest.mark.parametrize("ask", ["GET /", "GET /run/demo/report.html", "POST /run/demo/stop"])
def test_a_foreign_host_is_refused(controlled, ask, host):
    def put(text):
        return text.replace("PORT", str(controlled.port))

    host = [put(it) for it in host] if isinstance(host, list) else put(host)
    headers = {"Host": host, "Origin": controlled.origin, "Authorization": f"Bearer {controlled.token}"}
    status, _, text = controlled.ask(*ask.split(), headers)
    assert status in (400, 403)
    assert "Runs" not in text


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1:PORT", ""])
def test_what_a_page_of_another_origin_asks_for_is_refused(controlled, origin):
    origin = origin.replace("PORT", str(controlled.port)) or None
    assert controlled.post("/run/demo/stop", Origin=origin)[0] == 403
    polling = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    assert controlled.ask("POST", polling, {"Origin": origin} if origin else {})[0] == 403
    if origin:
        assert controlled.ask("GET", polling, {"Origin": origin})[0] == 403


@pytest.mark.parametrize("foreign", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, {}])
def test_a_websocket_from_elsewhere_is_refused_and_one_of_the_page_is_not(looking, foreign):
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade |= {"Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg=="}
    path = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    assert looking.ask("GET", path, upgrade | foreign)[0] == 403
    connection = http.client.HTTPConnection("127.0.0.1", looking.port)
    connection.request("GET", path, headers=upgrade | {"Origin": looking.origin})
    assert connection.getresponse().status == 101


@pytest.mark.parametrize("given", [None, "Bearer", "Bearer ", "Bearer nonsense", "Basic TOKEN", "TOKEN", "Bearer \xff"])
def test_without_the_token_nothing_is_done(controlled, given):
    given = given and given.replace("TOKEN", controlled.token)
    for action in ("start", "stop", "snapshot", "steps", "none"):
        assert controlled.post(f"/run/demo/{action}", Authorization=given)[0] == 401


def test_a_dashboard_that_only_looks_does_nothing_whatever_it_is_given(looking):
    assert looking.token is None
    for given in ("", "None", "null"):
        assert looking.post("/run/demo/stop", Authorization=f"Bearer {given}")[0] == 403


@pytest.mark.parametrize("name", ["outside", "..", "%2e%2e", ".hidden", "none", "..%2Fsecret", "demo%2Flogs"])
def test_what_is_asked_of_no_run_is_refused(controlled, name):
    assert controlled.post(f"/run/{name}/stop")[0] in (404, 405, 409)


def test_every_answer_forbids_other_servers_frames_and_caches(looking):
    for path in ("/", "/run/demo", "/run/demo/report.html", "/run/none"):
        _, headers, _ = looking.ask("GET", path)
        assert headers["content-security-policy"] == (guard.REPORT if path.endswith(".html") else guard.PAGES)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert not headers.get_all("set-cookie")


def test_control_needs_a_terminal_to_show_its_token_in(runs):
    ran = subprocess.run([sys.executable, SCRIPT, runs, "--allow-control"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: ")
    assert ran.stdout == ""


def test_a_missing_folder_and_a_port_in_use_are_one_sentence(runs, looking):
    for arguments in ([runs / "none"], [runs, "--port", str(looking.port)], [runs, "--port", "99999"]):
        ran = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
        assert ran.returncode == 2
        assert len(ran.stderr.splitlines()) == 1


def test_the_token_is_in_no_answer_and_no_command_line(controlled, looking):
    assert len(controlled.answers) > 40
    assert not [answer for answer in controlled.answers if controlled.token.encode() in answer]
    started_with = Path(f"/proc/{controlled.process.pid}/cmdline")
    files = [file for file in controlled.runs.rglob("*") if file.is_file()]
    for file in (started_with, *files):
        assert not file.exists() or controlled.token.encode() not in file.read_bytes()
