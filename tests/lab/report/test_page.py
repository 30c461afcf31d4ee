"""The page of `sdp4bit report` in a real browser.

Layer: one process of chromium. Without chromium or Chrome the test is skipped.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from plotly.offline import get_plotlyjs

from sdp4bit_lab.report.command import ReportConfig, write_report
from tests.lab.report.written_runs import (
    alert_event,
    communication_event,
    settings,
    train_event,
    train_events,
    validation_event,
    write_run,
)

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path is not None), None)
pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is on the path"),
]

# Runs at the end of a copy of the page and writes its result into the page, which is then dumped.
EXAMINE = """{
const found = {violations: []};
document.addEventListener("securitypolicyviolation", (e) => found.violations.push(e.blockedURI));
const plot = (number) => document.querySelectorAll("[data-figure]")[number];
const lines = (number) => plot(number).querySelectorAll(".cartesianlayer .js-line").length;
// Plotly draws at most every 50 ms.
const soon = () => new Promise((done) => setTimeout(done, 200));
const hover = async (number, place) => {
  Plotly.Fx.hover(plot(number), place, ["xy"]);
  await soon();
  return [...plot(number).querySelectorAll(".hoverlayer text")].map((text) => text.textContent).join("; ");
};
const examine = async () => {
%s
found.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
document.body.insertAdjacentHTML("beforeend", "<pre id=found></pre>");
document.getElementById("found").textContent = JSON.stringify(found);
};
examine();
}"""


def examine(page, tmp_path, script, *, width=1200):
    """Return the result of a script that runs in a copy of the page, whose policy allows it."""
    script = EXAMINE % script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = page.read_text().replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    copy = tmp_path / "examined.html"
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
    options += (
        f"--window-size={width},900",
        "--virtual-time-budget=10000",
        f"--user-data-dir={tmp_path}/user",
    )
    done = subprocess.run(
        [str(BROWSER), *options, copy.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert match is not None, done.stdout[-2000:]
    found = json.loads(unescape(match[1]))
    assert found.pop("resources") == [] and found.pop("violations") == []
    return found


def test_a_browser_shows_values_switches_runs_off_and_runs_no_text_of_the_files(tmp_path):
    attack = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\"><a href='https://x'>%{x}"
    name = attack.replace("/", "_")
    events = [train_event(s, loss=None if s == 60 else 5.0) for s in range(1, 101)]
    events += [
        validation_event(100, 4.0),
        alert_event(50, attack + "\ud800", group=attack),
        {"event": "resume", "step": 40},
        *(communication_event(step, root=90_000 + step, block=30_000) for step in (10, 20, 90)),
        {"event": attack},
    ]
    runs = (
        write_run(
            tmp_path / "plain",
            [*train_events(100, inter_bytes=2_000_000), validation_event(50, 4.5)],
            config=settings("baseline"),
        ),
        write_run(tmp_path / name, events, config=settings(attack) | {attack: attack}),
    )
    page = write_report(ReportConfig(runs=runs, out=tmp_path / "report.html"))
    assert page.read_text().replace(get_plotlyjs(), "").count("<script") == 3
    found = examine(
        page,
        tmp_path,
        """
        document.querySelector("details").open = true;
        found.titles = [...document.querySelectorAll("figure h3")].map((title) => title.textContent);
        found.loss = await hover(0, {xval: 100});
        found.validation = await hover(1, {xval: 100});
        found.difference = await hover(2, {xval: 1});
        found.seconds = await hover(4, {xval: 100});
        found.bytes = await hover(5, {xval: 100});
        const points = (number) => plot(number).querySelectorAll(".cartesianlayer .point").length;
        found.points = [points(0), points(1)];
        found.marks = plot(0).querySelectorAll(".shapelayer path").length;
        found.bars = plot(7).data.map((trace) => [trace.x, trace.y]);
        found.order = plot(5).data.map((trace) => trace.zorder);
        found.lines = [lines(0)];
        const [first] = document.querySelectorAll("nav button");
        for (const click of [1, 2]) {
          first.click();
          await soon();
          found.lines.push(lines(0));
        }
        found.links = document.links.length;
        found.title = document.title;
        found.scripts = document.scripts.length;
        found.images = document.images.length;
        found.alert = document.querySelector("#alerts tbody").innerText;
        found.settings = document.querySelector("#settings tbody").innerText;
        found.wide = document.documentElement.scrollWidth - window.innerWidth;
        """,
        width=500,
    )
    assert found["titles"] == [
        *("Training loss", "Validation loss", "Training loss relative to baseline", "Gradient norm"),
        *("Step time", "Inter-node bytes", "Intra-node bytes", "Inter-node bytes by parameter group"),
    ]
    assert found["points"] == [0, 2] and found["marks"] == 1 and found["order"] == [0, 1]
    assert found["bars"] == [[[None, None], ["root", "block"]], [[90_020, 30_000], ["root", "block"]]]
    shown = name.removesuffix("%{x}")  # plotly puts values in its place
    for plot, start, end in (
        ("loss", "step 100; plain : 4.5", "5.0000"),
        ("validation", f"step 100; {shown}", "4.0000"),
        ("difference", f"step 1; {shown}", ""),
        ("seconds", "step 100; plain : 250.0ms; ", "250.0ms"),
        ("bytes", "step 100; plain : 2.000MB; ", "250.0kB"),
    ):
        text = found[plot]
        assert text.startswith(start) and shown in text and text.endswith(f" : {end}" if end else ""), text
    assert re.search(r" : [-−]2\.\d+$", found["difference"])
    assert found["lines"] == [6, 4, 6]  # the NaN in the second run makes two lines of one, faint and smoothed
    assert (found["scripts"], found["images"], found["links"]) == (4, 0, 0)
    assert found["title"].startswith("Training report") and found["wide"] <= 0
    assert attack in found["alert"] and attack in found["settings"]
