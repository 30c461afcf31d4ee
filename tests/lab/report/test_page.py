"""The page of `sdp4bit report` in a real browser: what it draws, reads out, switches off and never loads.

Layer: one process of chromium per test. Without chromium or Chrome these tests are skipped.
"""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
import torch
from plotly.offline import get_plotlyjs

from sdp4bit_lab.report.command import ReportConfig, write_report
from tests.lab.pretrain.tiny_runs import small, train_here
from tests.lab.report.written_runs import (
    alert_event,
    communication_event,
    settings,
    train_event,
    validation_event,
    write_run,
)
from tests.ranks import run_ranks

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path is not None), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is on the path")

# Goes to the end of a copy of the page, writes what it finds into the page, and is read from the dumped page.
EXAMINE = """
const found = {violations: []};
document.addEventListener("securitypolicyviolation", (e) => found.violations.push(e.blockedURI));
const figure = (key) => document.getElementById("plot-" + key);
const plot = (key) => figure(key).querySelector("[data-figure]");
const lines = (key) => figure(key).querySelectorAll(".scatterlayer .js-line").length;
const texts = (key, of) => [...figure(key).querySelectorAll(of + " text")].map((text) =>
  [...text.querySelectorAll("tspan.line")].map((line) => line.textContent).join("|") || text.textContent);
// Plotly draws what it reads out at most every 50 ms.
const soon = () => new Promise((done) => setTimeout(done, 200));
const hover = async (key, place) => {
  Plotly.Fx.hover(plot(key), place, ["xy"]);
  await soon();
  return texts(key, ".hoverlayer").join("; ");
};
const press = async (key, name) => {
  plot(key).dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true}));
  await soon();
  return texts(key, ".hoverlayer").join("; ");
};
const examine = async () => {
%s
found.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
const place = document.createElement("pre");
place.id = "found";
place.textContent = JSON.stringify(found);
document.body.append(place);
};
examine();
"""


def browse(page, tmp_path, *, script=None, width=1200):
    """Return the page after its script and, in a copy without the policy against it, another one."""
    if script is not None:
        text, policies = re.subn(r"<meta http-equiv[^>]*>", "", page.read_text())
        assert policies == 1
        page = tmp_path / "examined.html"
        page.write_text(text.replace("</body>", f"<script>{{{EXAMINE % script}}}</script></body>"))
    done = subprocess.run(
        [
            str(BROWSER),
            *("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"),
            *(f"--window-size={width},900", "--virtual-time-budget=10000"),
            f"--user-data-dir={tmp_path / 'profile'}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def examine(page, tmp_path, script, **options):
    dumped = browse(page, tmp_path, script=script, **options)
    match = re.search(r'<pre id="found">(.*?)</pre>', dumped, re.S)
    assert match is not None, dumped[-2000:]
    found = json.loads(unescape(match[1]))
    assert found.pop("resources") == [] and found.pop("violations") == []
    return found


def made_up_runs(tmp_path):
    steps = range(1, 101)
    plain = [train_event(s, weight_drift=None, gradient_error=None, inter_bytes=2_000_000) for s in steps]
    quantized = [train_event(s, loss=None if s == 60 else 5.0) for s in steps]
    reports = [communication_event(s, gradient_error=s / 100) for s in (20, 40)]
    reports += [validation_event(50, 4.25), validation_event(100, 4.0)]
    return (
        write_run(tmp_path / "plain", [*plain, validation_event(50, 4.5)], config=settings("baseline")),
        write_run(tmp_path / "4bit", [*quantized, *reports, alert_event(50, "a warning", group="norm")]),
    )


def test_values_are_read_and_runs_switched_off(tmp_path):
    page = write_report(ReportConfig(runs=made_up_runs(tmp_path), out=tmp_path / "report.html"))
    found = examine(
        page,
        tmp_path,
        """
        found.figures = [...document.querySelectorAll("figure")].map((f) => f.id);
        found.noMaps = figure("group_nonfinite_groups").innerText;
        found.bytes = await hover("inter_bytes", {xval: 100});
        found.validation = await hover("validation", {xval: 99});
        found.difference = await hover("difference", {xval: 1});
        found.fault = await hover("loss", {xval: 60});
        found.alert = await hover("loss", {xval: 50});
        found.cell = await hover("group_gradient_error", {xval: 1, yval: 0});
        plot("lr").focus();
        for (const key of ["ArrowRight", "ArrowRight"]) found.keyed = await press("lr", key);
        found.aloud = document.getElementById("read").textContent;
        found.escaped = await press("lr", "Escape");
        found.lines = [lines("loss")];
        const [first, second] = document.querySelectorAll("nav button");
        first.click();
        found.pressed = first.getAttribute("aria-pressed");
        found.lines.push(lines("loss"));
        second.click();
        found.allOff = figure("loss").innerText + figure("group_weight_drift").innerText;
        first.click();
        second.click();
        found.lines.push(lines("loss"));
        found.allOn = document.querySelectorAll(".off:not([hidden]), [data-figure][hidden]").length;
        found.switches = texts("lr", ".updatemenu-button");
        figure("lr").querySelector(".updatemenu-button").dispatchEvent(new MouseEvent("click"));
        await soon();
        found.axis = plot("lr").layout.yaxis.type;
        found.wide = document.documentElement.scrollWidth > window.innerWidth;
        """,
    )
    assert len(found["figures"]) == 15 and "plot-difference" in found["figures"]
    assert found["lines"] == [6, 4, 6]  # the gap in the second run makes two lines of one
    assert "4bit: none in 2 reports of 5 groups" in found["noMaps"]
    assert found["bytes"] == "step 100; plain : 2MB; 4bit : 250kB"
    assert found["validation"] == "step 100; 4bit : 4.0000"
    assert re.fullmatch(r"step 1; 4bit : [-−]2\.9\d{3}; 4bit, smoothed : [-−+]\d\.\d{4}", found["difference"])
    assert "; 4bit : not finite" in found["fault"]
    assert "; 4bit : norm: a warning" in found["alert"]
    assert found["cell"] == "embedding|step 40: 0.4"
    assert found["keyed"] == found["aloud"] == "step 3; plain : 0.001; 4bit : 0.001"
    assert found["escaped"] == ""
    assert found["pressed"] == "false"
    assert found["allOff"].count("All runs of this plot are switched off.") == 2 and found["allOn"] == 0
    assert (found["switches"], found["axis"]) == (["log scale"], "log")
    assert not found["wide"]


def test_text_of_the_files_is_shown_and_never_run(tmp_path):
    attack = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\"><a href='https://x'>%{x}"
    config = settings(attack) | {attack: attack, "versions": {"torch": attack}}
    events = [
        *(train_event(step) for step in range(1, 4)),
        communication_event(2, [attack, "\ud800"]),
        alert_event(3, attack, group=attack, **{attack: 1.0}),
        {"event": attack},
    ]
    run = write_run(tmp_path / attack.replace("/", "_"), events, config=config)
    page = write_report(ReportConfig(runs=(run,), out=tmp_path / "report.html"))
    assert page.read_text().replace(get_plotlyjs(), "").count("<script") == 3
    found = examine(
        page,
        tmp_path,
        """
        found.hover = await hover("group_gradient_error", {xval: 0, yval: 0});
        found.hover += await hover("loss", {xval: 3});
        found.links = document.links.length;
        found.title = document.title;
        found.scripts = document.scripts.length;
        found.images = document.images.length;
        found.alert = document.querySelector("#alerts tbody").innerText;
        found.wide = document.documentElement.scrollWidth - window.innerWidth;
        """,
        width=500,
    )
    assert (found["scripts"], found["images"]) == (4, 0)
    assert found["wide"] <= 0 and found["links"] == 0
    assert found["hover"].count(attack) >= 3
    assert found["title"].startswith("Training report") and attack in found["alert"]


@pytest.mark.slow
def test_odd_numbers_are_drawn_as_well(tmp_path):
    odd = [
        train_event(
            step,
            loss=1e17 + 16 * step,
            lr=0.0,
            grad_norm=None if step % 2 else 1e300 * step,
            step_seconds=1e-12,
            intra_bytes=0,
            inter_bytes=10**18 * step,
            compression_ratio=None,
            weight_drift=-1.0,
        )
        for step in range(1, 31)
    ]
    alerts = [alert_event(step, "again") for step in range(2000)]
    runs = (
        write_run(tmp_path / "odd", [*odd, communication_event(5, gradient_error=0), *alerts]),
        write_run(tmp_path / "empty", [], end=""),
        write_run(tmp_path / "one", [train_event(7), validation_event(7, None)]),
    )
    page = write_report(ReportConfig(runs=runs, out=tmp_path / "report.html"))
    found = examine(
        page,
        tmp_path,
        """
        for (let times = 0; times < 2; times += 1) {
          for (const button of document.querySelectorAll(".updatemenu-button")) {
            button.dispatchEvent(new MouseEvent("click"));
            await soon();
          }
        }
        found.marks = [...document.querySelectorAll("figure path, figure text, figure use")];
        found.marks = found.marks.flatMap((mark) => [...mark.attributes].map((name) => name.value));
        found.marks = found.marks.filter((value) => /NaN|Infinity/.test(value));
        found.drawn = document.querySelectorAll("[tabindex] .plot-container").length;
        found.alerts = figure("loss").querySelectorAll(".overplot .scatterlayer .point").length;
        found.bytes = await hover("inter_bytes", {xval: 13});
        """,
    )
    assert found["marks"] == [] and found["drawn"] == 11 and found["alerts"] > 0
    assert re.search(r"odd : \d+EB", found["bytes"])


def test_a_real_run_is_shown_as_it_was_and_needs_no_policy_lifted(text, tmp_path):
    out = tmp_path / "run"
    results = run_ranks(train_here, 2, small(text, out))
    page = write_report(ReportConfig(runs=(out,), out=tmp_path / "report.html"))
    dumped = browse(page, tmp_path)
    assert f"{results[0][0].validation_loss:.4f} at step 8" in dumped
    assert f"{results[0][0].train_loss:.4f}" in dumped
    assert "weight differences 4 bits" in dumped and "8 / 8" in dumped
    assert "2, 2 per node" in dumped and f"torch {torch.__version__}" in dumped
    assert len(re.findall(r'<path class="js-line" d="M[^"]{50,}', dumped)) >= 4
