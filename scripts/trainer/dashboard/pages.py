"""The pages: all runs, and one for each."""

import asyncio
import html
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi.responses import PlainTextResponse, Response
from nicegui import ui

from trainer import commands, packs, status
from trainer.dashboard.actions import Actions
from trainer.dashboard.readings import Hardware, Recent, Runs, Series, tail
from trainer.errors import TrainerError
from trainer.job import duration
from trainer.packs.base import LoraPack

HERE = Path(__file__).parent
EVERY = 3.0
# A square of the accent's colour, so that no other picture is loaded.
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8"><rect width="8" height="8" rx="2" fill="#3f74df"/></svg>'
)
UNKNOWN = "\N{EN DASH}"
NEWEST = ""  # the log of what runs, or else ran last
BAR = """
<q-td :props="props">
  <q-linear-progress rounded size="8px" :value="props.row.share" :class="'bar ' + props.row.state"
    :aria-label="props.row.name" />
  <div class="small">{{ props.row.text }}</div>
</q-td>"""
STATE = '<q-td :props="props"><span :class="\'state \' + props.row.state">{{ props.row.state }}</span></q-td>'
STAGE = STATE.replace("<span", "{{ props.row.name }} <span")
LINK = (
    """<q-td :props="props"><a :href="'/run/' + encodeURIComponent(props.row.name)">{{ props.row.name }}</a></q-td>"""
)

Values = dict[str, Any]
machine = Recent(Hardware(), 2.5)


def define(runs: Runs, actions: Actions, control: bool) -> None:
    """Define the pages; with `control` those of runs have what is asked for with the token."""
    ui.add_head_html(f"<style>{(HERE / 'dashboard.css').read_text(encoding='utf-8')}</style>", shared=True)
    ui.add_head_html(f"<script>{(HERE / 'dashboard.js').read_text(encoding='utf-8')}</script>", shared=True)

    @ui.page("/", response_timeout=60)
    async def overview() -> None:
        ui.page_title("Runs · gguf-trainer")
        with ui.element("header"):
            ui.html("Runs", tag="h1", sanitize=False)
            ui.label(str(runs.folder)).classes("soft")
        with _section():
            table = _table(
                "Runs", ["run", "state", "at", "val cosine", "disk"], {"run": LINK, "state": STATE}, "no runs yet"
            )
        await _repeat(lambda: [_summary(runs, name) for name in runs.names()], lambda rows: _fill(table, rows), 10.0)

    @ui.page("/run/{name}", response_timeout=60)
    async def one(name: str) -> Response | None:
        try:
            runs.run(name)
        except TrainerError:
            return PlainTextResponse("there is no such run", 404)
        page = _RunPage(runs, actions, name, control)
        await _repeat(page.read, page.show, EVERY)
        return None


async def _repeat(read: Callable[[], Any], show: Callable[[Any], None], seconds: float) -> None:
    """Show what is read, now and again and again while the page is open; reading does not hold up other pages."""

    async def once() -> None:
        show(await asyncio.to_thread(read))

    await once()
    ui.timer(seconds, once, immediate=False)


class _RunPage:
    """The page of a run: all of it is there from the start, and only what it says changes."""

    def __init__(self, runs: Runs, actions: Actions, name: str, control: bool) -> None:
        self.runs, self.actions, self.name = runs, actions, name
        ui.page_title(f"{name} · gguf-trainer")
        with ui.element("header"):
            ui.html('<a href="/">Runs</a>', tag="nav", sanitize=False)
            with ui.element("div").classes("title"):
                ui.html(html.escape(name), tag="h1", sanitize=False)
                self.state = ui.label().classes("state")
            with ui.element("div").classes("soft facts"):
                self.about = ui.label()
                self.report = ui.link("Report", f"/run/{quote(name, safe='')}/report.html")
        self.problems = ui.element("div").classes("problems").props("role=status")
        if control:
            self._control()
        with _section("Stages"):
            self.stages = _table("Stages", ["stage", "progress", "disk"], {"stage": STAGE, "progress": BAR})
        with _section("Running"):
            self.jobs = _table("Running jobs", ["job", "where", "at", "rate", "left"], {}, "nothing runs")
        with _section("Figures"), ui.element("dl").classes("tiles"):
            names = (
                "step",
                "loss",
                "cosine",
                "learning rate",
                "speed",
                "val cosine",
                "best val cosine",
                "exported file",
            )
            self.figures = {figure: _tile(figure) for figure in names}
        with _section("Curves"), ui.element("div").classes("charts"):
            self.charts = [
                _Chart("Loss", {"loss": "loss", "mse": "mse", "val_loss": "val"}),
                _Chart("Cosine to the teacher", {"cos": "train", "val_cos": "val"}),
                _Chart("Learning rate", {"lr": "learning rate"}, zero=True),
                _Chart("Prompts a second", {"prompts_per_s": "prompts/s", "pictures_per_s": "pictures/s"}, zero=True),
            ]
        with _section("This machine").classes("machine"):
            ui.label(socket.gethostname()).classes("soft small")
            self.machine = _table("This machine", ["part", "use"], {"use": BAR})
        with _section("Snapshots"):
            columns = ["step", "val cosine", "of the file", "size", "made", "file"]
            self.snapshots = _table("Snapshots", columns, {}, "none yet")
        with _section("Log"):
            self.choice = ui.select({NEWEST: "newest"}, value=NEWEST, label="Job", on_change=self._chosen)
            self.choice.props("dense outlined options-dense").classes("choice")
            with ui.element("div").classes("log").props('tabindex=0 role=region aria-label="The end of the log"'):
                self.text = ui.label().classes("lines")

    def _control(self) -> None:
        """What asks for something; the token stays in the browser, so that none of it is an element of the server's."""
        try:
            command = commands.read(self.runs.run(self.name)).text()
            note = f"Start gives this command again: <code>{html.escape(command)}</code>"
        except TrainerError as error:
            note = html.escape(str(error)[0].upper() + str(error)[1:]) + "."
        form = (HERE / "control.html").read_text(encoding="utf-8")
        with _section("Control"):
            ui.html(form.replace("{{ run }}", html.escape(self.name)).replace("{{ note }}", note), sanitize=False)

    async def _chosen(self) -> None:
        self.show(await asyncio.to_thread(self.read))

    def read(self) -> Values:
        """All that is shown."""
        try:
            logs = self.runs.logs(self.name)
            found = self.runs.status(self.name)
            running = [job["name"] for job in found["jobs"] if job["alive"] is not False]
            newest = next((name for name in (*running, *logs) if name in logs), None)
            log = logs.get(self.choice.value or newest)
            return {
                **{"status": found, "curves": self.runs.curves(self.name), "machine": machine()},
                **{"logs": {NEWEST: f"newest: {newest or 'none yet'}"} | {name: name for name in logs}},
                **{"text": tail(log) if log else ""},
                **{"snapshots": self.runs.snapshots(self.name), "report": self.runs.report(self.name) is not None},
                **{"failed": self.actions.failed(self.name, found["state"])},
            }
        except TrainerError as error:
            return {"gone": str(error)}

    def show(self, found: Values) -> None:
        """Bring the page up to date."""
        if "gone" in found:
            self._show_problems([("failed", found["gone"])])
            return
        now: Values = found["status"]
        self.state.set_text(now["state"])
        self.state.classes(replace=f"state {now['state']}")
        clock = time.strftime("%H:%M:%S", time.localtime(now["time"]))
        disk = now["disk"]
        needed = "" if disk["needed_bytes"] is None else f"{_size(disk['needed_bytes'])} still needed, "
        used = f"{_size(disk['used_bytes'])} used, {needed}{_size(disk['free_bytes'])} free"
        self.about.set_text(f"{now['pack'] or 'unknown pack'} · {used} · as of {clock}")
        self.report.set_visibility(found["report"])
        problems = [(it["kind"], f"{it['job']}: {it['message']}") for it in now["problems"]]
        self._show_problems(
            [*problems, *(("failed", text) for text in found["failed"])] + [("note", n) for n in now["notes"]]
        )
        _fill(self.stages, [_stage(stage) for stage in now["stages"]])
        _fill(self.jobs, [_job(job, now["time"]) for job in now["jobs"] if job["alive"] is not False])
        for name, value in _figures(now).items():
            self.figures[name].set_text(value)
        for chart in self.charts:
            chart.show(found["curves"])
        _fill(self.machine, _machine(found["machine"]))
        _fill(self.snapshots, [_snapshot(entry) for entry in found["snapshots"]])
        if found["logs"] != self.choice.options:  # an open list would close
            self.choice.set_options(found["logs"])
        self.text.set_text(found["text"])

    def _show_problems(self, problems: list[tuple[str, str]]) -> None:
        if problems != getattr(self, "shown", []):
            self.shown = problems
            self.problems.clear()
            with self.problems:
                for kind, text in problems:
                    ui.label(f"{kind}: {text}").classes(f"problem {kind}")


# --- parts of a page ------------------------------------------------------------------------------------------------


def _section(title: str = "") -> ui.element:
    section = ui.element("section")
    if title:
        with section:
            ui.html(title, tag="h2", sanitize=False)
    return section


def _table(label: str, columns: list[str], slots: dict[str, str], empty: str = "nothing yet") -> ui.table:
    """A table whose cells are the texts of its rows under the names of its columns, except where a slot draws them."""
    names = [{"name": name, "label": name, "field": name, "align": "left"} for name in columns]
    table = ui.table(columns=names, rows=[], row_key="key").classes("w-full")
    table.props(f'flat dense wrap-cells hide-pagination no-data-label="{empty}" table-aria-label="{label}"')
    for column, template in slots.items():
        table.add_slot(f"body-cell-{column}", template)
    return table


def _fill(table: ui.table, rows: list[Values]) -> None:
    """Set the rows of a table; nothing is sent where they are the same."""
    rows = [{"key": index, **row} for index, row in enumerate(rows)]
    if rows != table.rows:
        table.rows = rows


def _tile(name: str) -> ui.label:
    with ui.element("div"):
        ui.html(name, tag="dt", sanitize=False)
        with ui.element("dd"):
            return ui.label(UNKNOWN)


class _Chart:
    """A chart of curves over steps."""

    COLOURS = ("#4f86e8", "#e0672a")

    def __init__(self, title: str, curves: dict[str, str], zero: bool = False) -> None:
        self.curves = curves
        axis = {"type": "value", "splitLine": {"lineStyle": {"color": "rgba(128,128,128,.22)"}}}
        with ui.element("figure"):
            ui.html(title, tag="figcaption", sanitize=False)
            self.chart = ui.echart(
                {
                    "animation": False,
                    "aria": {"enabled": True, "label": {"description": f"{title} over steps"}},
                    "color": self.COLOURS,
                    "grid": {"left": 6, "right": 18, "top": 30, "bottom": 4, "containLabel": True},
                    "legend": {"right": 0, "top": 0, "itemHeight": 8, "itemWidth": 16, "show": len(curves) > 1},
                    "tooltip": {"trigger": "axis", "className": "tip", "confine": True},
                    "xAxis": axis | {"splitLine": {"show": False}, "min": 0, "splitNumber": 4},
                    "yAxis": axis | {"scale": not zero, "splitNumber": 4},
                    "series": [
                        {"type": "line", "name": name, "data": [], "showSymbol": False, "lineStyle": {"width": 1.7}}
                        for name in curves.values()
                    ],
                },
                renderer="svg",
            )

    def show(self, found: Series) -> None:
        """Draw the points there are now."""
        data = [[list(point) for point in found[curve]] for curve in self.curves]
        series = self.chart.options["series"]
        if [it["data"] for it in series] != data:
            for it, points in zip(series, data, strict=True):
                it |= {"data": points, "showSymbol": len(points) < 40, "symbolSize": 4}
            self.chart.update()


# --- what is said ---------------------------------------------------------------------------------------------------


def _summary(runs: Runs, name: str) -> Values:
    try:
        now = runs.status(name)
    except TrainerError as error:  # it was deleted just now
        return {"run": name, "name": name, "state": "failed", "at": str(error)}
    left = [stage for stage in now["stages"] if stage["state"] != "done"]
    at = next((stage for stage in left if stage["state"] == "running"), left[0] if left else None)
    return {
        **{"run": name, "name": name, "state": now["state"]},
        "at": f"{at['name']}: {status.progress(at)}" if at else "done",
        "val cosine": _cosine(_exported(now) or (now["metrics"]["val"] or {}).get("best_cos")),
        "disk": _size(now["disk"]["used_bytes"]),
    }


def _stage(stage: Values) -> Values:
    pace, disk = status.pace_and_disk(stage)
    share = 1.0 if stage["state"] == "done" else min(1.0, stage["done"] / stage["total"]) if stage["total"] else 0.0
    text = " · ".join(filter(None, (status.progress(stage), pace)))
    return {**{"name": stage["name"], "state": stage["state"], "share": round(share, 4), "text": text}, "disk": disk}


def _job(job: Values, now: float) -> Values:
    counted = job["total"] and job["done"] is not None
    silent = f", as of {duration(now - job['updated'])} ago" if job["alive"] is None and job["updated"] else ""
    return {
        "job": job["name"],
        "where": f"process {job['pid']} on {job['host']}{silent}",
        "at": f"{job['what']}: {status.progress(job)}" if counted else UNKNOWN,
        "rate": f"{job['rate']:.3g} {job['unit']}/s" if job["rate"] else UNKNOWN,
        "left": UNKNOWN if job["eta_s"] is None else duration(job["eta_s"]),
    }


def _figures(now: Values) -> dict[str, str]:
    train, val = now["metrics"]["train"] or {}, now["metrics"]["val"] or {}
    stage = next(stage for stage in now["stages"] if stage["name"] == "train")
    return {
        "step": f"{stage['done']:,}" + (f" of {stage['total']:,}" if stage["total"] else ""),
        "loss": _number(train.get("loss")),
        "cosine": _cosine(train.get("cos")),
        "learning rate": _number(train.get("lr")),
        "speed": next(
            (f"{rate:,.0f} {unit}/s" for unit in ("prompts", "pictures") if (rate := train.get(f"{unit}_per_s"))),
            UNKNOWN,
        ),
        "val cosine": _cosine(val.get("val_cos")),
        "best val cosine": _cosine(val.get("best_cos")),
        "exported file": _cosine(_exported(now)),
    }


def _exported(now: Values) -> float | None:
    """The figure of the exported file of an adapter."""
    evaluation, pack = now["metrics"]["evaluation"] or {}, packs.get(now["pack"]) if now["pack"] else None
    return None if isinstance(pack, LoraPack) else evaluation.get(pack.metric if pack else "cos")


def _machine(found: Values) -> list[Values]:
    ram = f"{_size(found['ram_used'])} of {_size(found['ram_total'])}"
    rows = [
        _use("CPU", found["cpu"], f"{found['cpu']:.0%} of {found['cores']} cores, load {found['load']:.1f}"),
        _use("RAM", found["ram_used"] / found["ram_total"], ram),
    ]
    for gpu in found["gpus"]:
        also = [f"{gpu['celsius']:.0f} °C"] if gpu["celsius"] is not None else []
        also += [f"{gpu['watts']:.0f} W"] if gpu["watts"] is not None else []
        busy = "use unknown" if gpu["used"] is None else f"{gpu['used']:.0%} busy"
        rows.append(_use(gpu["name"], gpu["used"] or 0, ", ".join([busy, *also])))
        if gpu["memory_total"]:
            memory = f"{_size(gpu['memory_used'])} of {_size(gpu['memory_total'])}"
            rows.append(_use("its memory", gpu["memory_used"] / gpu["memory_total"], memory))
    if not found["gpus"]:
        rows.append(_use("GPU", 0, "no NVIDIA GPU here"))
    return rows


def _use(part: str, share: float, text: str) -> Values:
    return {"part": part, "name": part, "state": "running", "share": round(min(1.0, share), 3), "text": text}


def _snapshot(entry: Values) -> Values:
    scores = entry.get("eval") or {}
    made = entry.get("time")
    return {
        "step": f"{entry['step']:,}",
        "val cosine": _cosine(entry.get("val_cos")),
        "of the file": _cosine(
            next((scores[name] for name in ("cos_slice", "cos_centered", "cos") if name in scores), None)
        ),
        "size": _size(entry.get("size")),
        "made": time.strftime("%Y-%m-%d %H:%M", time.localtime(made)) if made else UNKNOWN,
        "file": Path(entry.get("path") or UNKNOWN).name,
    }


def _size(count: float | None) -> str:
    return UNKNOWN if count is None else status.size_text(count)


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"


def _cosine(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}"
