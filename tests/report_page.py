"""Opens a page of `retrace report` in headless Chromium and looks at it, over the DevTools protocol.

  report_page.py check PAGE LOG       LOG: what `retrace log RUN... --json` prints of the same runs
  report_page.py time PAGE            how long the page takes to open
  report_page.py pictures PAGE DIR    screenshots at phone and desktop width, light, dark, printed

Exit code 0: as it should be; 1: not, with the reason; 77: there is no Chromium here.
"""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

import numpy
import websocket
from PIL import Image

NO_CHROMIUM = 77


class Browser:
    """One headless Chromium with one page; what the page complained about is kept."""

    def __init__(self):
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        if program is None:
            print("no chromium: scripts/setup.sh --for-tests installs it")
            sys.exit(NO_CHROMIUM)
        self.folder = tempfile.mkdtemp(prefix="retrace-chromium-")
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-port=0",
             "--disable-backgrounding-occluded-windows", "--disable-renderer-backgrounding",
             "--user-data-dir=" + self.folder, "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.complaints, self.requests, self.next_id, self.loaded = [], [], 0, False
        self.socket = websocket.create_connection(self.page_url(), suppress_origin=True, timeout=600)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        self.call("Page.bringToFront")  # keys to a page in the background wait for ever

    def page_url(self):
        path = os.path.join(self.folder, "DevToolsActivePort")
        for _ in range(1200):
            if self.process.poll() is not None:
                raise RuntimeError(f"chromium ended with code {self.process.returncode}")
            if os.path.exists(path) and open(path).read().count("\n"):
                port = open(path).readline().strip()
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as pages:
                    for page in json.load(pages):
                        if page["type"] == "page":
                            return page["webSocketDebuggerUrl"]
            time.sleep(0.1)
        raise RuntimeError("chromium did not open its DevTools port within two minutes")

    def call(self, method, **params):
        self.next_id += 1
        call_id = self.next_id
        self.socket.send(json.dumps({"id": call_id, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == call_id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.note(message)

    def note(self, message):
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def run(self, script):
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script[:80]}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def size(self, width, height, dark=False, mobile=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=2 if mobile else 1, mobile=mobile)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def open(self, path):
        """-> seconds from the start of the navigation until everything is drawn and painted."""
        self.requests.clear()
        self.loaded = False
        begin = time.monotonic()
        self.call("Page.navigate", url="file://" + os.path.abspath(path))
        while not self.loaded:
            self.note(json.loads(self.socket.recv()))
        expect(self.run("!!document.documentElement.dataset.drawn"), "not drawn:", self.complaints)
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - begin

    def picture(self, whole=False):
        clip = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"captureBeyondViewport": True,
                    "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"])

    def pixels(self):
        return numpy.asarray(Image.open(io.BytesIO(self.picture())).convert("RGB")).astype(int)

    def key(self, key):
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def mouse(self, kind, x, y):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left",
                  buttons=0 if kind == "mouseReleased" else 1, clickCount=1)

    def close(self):
        try:
            self.call("Browser.close")
            self.socket.close()
        finally:
            self.process.wait(timeout=60)
            shutil.rmtree(self.folder, ignore_errors=True)


def expect(condition, *what):
    if not condition:
        raise AssertionError(" ".join(str(w) for w in what))


def read_log(path):
    """{run directory: [record]} of `retrace log --json`."""
    runs = {}
    for line in open(path):
        record = json.loads(line)
        runs.setdefault(record["run"], []).append(record)
    return runs


def number(x):
    return float(x) if isinstance(x, (int, float)) else {"nan": float("nan"), "inf": float("inf"),
                                                         "-inf": float("-inf")}[x]


def check_numbers(browser, runs):
    """The table of all numbers against the ledger, to the last digit."""
    names = browser.run("JSON.parse(document.getElementById('data').textContent).runs.map((r) => r.dir)")
    expect(names == list(runs), "runs on the page:", names, "in the log:", list(runs))
    browser.run("document.querySelector('#numbers details').open = true")
    for index, records in enumerate(runs.values()):
        browser.run(f"""(() => {{ const choice = document.getElementById('numbers-run');
            choice.value = {index}; choice.dispatchEvent(new Event('change')); }})()""")
        rows = browser.run("[...document.querySelectorAll('#numbers-table tbody tr')]"
                           ".map((tr) => [...tr.children].map((c) => c.textContent))")
        expect(len(rows) == len(records), "rows:", len(rows), "records:", len(records))
        for row, record in zip(rows, records):
            fields = ["update", "evaluation_loss", "loss", "gradient_norm", "clip", "lr"]
            for cell, field in zip(row, fields):
                if field not in record:
                    expect(cell == "–", field, cell)
                elif isinstance(record[field], str):
                    expect(cell.lower().replace("infinity", "inf") == record[field], field, cell)
                else:
                    expect(float(cell) == record[field], field, cell, record[field])
            expect(row[6] == record["action"], row)


def check_curve(browser, plot, item, values, log_scale):
    """The path of a curve, read back through the axis, against the ledger, to a tenth of a pixel."""
    shape = browser.run(f"""(() => {{ const svg = document.querySelector('#{plot} svg');
        return {{d: svg.querySelector('g[data-item="{item}"] .curve').getAttribute('d'),
                 ticks: [...svg.querySelectorAll('g > text[text-anchor=end]:not(.strong)')]
                     .map((t) => [t.textContent, Number(t.getAttribute('y'))])}}; }})()""")
    scale = numpy.log if log_scale else (lambda v: v)
    ticks = [(scale(float(t.replace("−", "-"))), y) for t, y in shape["ticks"]]
    (v0, y0), (v1, y1) = ticks[0], ticks[-1]
    expect(abs(y0 - y1) > 20, "ticks lie together:", ticks)
    points = [tuple(map(float, p.split())) for p in re.findall(r"[ML]([-0-9.]+ [-0-9.]+)", shape["d"])]
    expect(len(points) == len(values), "points:", len(points), "values:", len(values))
    for (_, y), value in zip(points, values):
        drawn = y0 + (scale(value) - v0) / (v1 - v0) * (y1 - y0)
        expect(abs(y - drawn) < 0.11, f"{plot}: a point is at {y}, {value} belongs at {drawn}")
    xs = [x for x, _ in points]
    steps = numpy.diff(xs)
    expect(steps.min() > 0 and steps.max() - steps.min() < 0.21, "updates are not evenly spaced")


def colored(browser, plot, item):
    """Pixels in a plot that have the colour of a curve."""
    place = browser.run(f"""(() => {{ const node = document.getElementById('{plot}');
        node.scrollIntoView({{block: 'center', behavior: 'instant'}});
        const box = node.getBoundingClientRect();
        const curve = node.querySelector('g[data-item="{item}"] .curve');
        return {{box: [box.left + 50, box.top, box.width > 720 ? box.right - 160 : box.right, box.bottom],
                 color: curve ? getComputedStyle(curve).stroke : null}}; }})()""")
    if place["color"]:
        colored.known[(plot, item)] = [int(c) for c in re.findall(r"\d+", place["color"])[:3]]
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    left, top, right, bottom = (int(v) for v in place["box"])
    area = browser.pixels()[top:bottom, left:right]
    return int((numpy.abs(area - colored.known[(plot, item)]).max(axis=2) <= 12).sum())


colored.known = {}


def check_pixels(browser, plot, item):
    """A curve can be seen, and is gone when it is switched off."""
    shown = colored(browser, plot, item)
    toggle = f"document.querySelectorAll('.legend input')[{item}].click()"
    browser.run(toggle)
    hidden = colored(browser, plot, item)
    browser.run(toggle)
    expect(shown > 60, f"{plot}: {shown} pixels have the colour of curve {item}")
    expect(hidden < shown / 4, f"{plot}: {hidden} of {shown} pixels are left of a hidden curve")


def check_keys(browser, records):
    """Arrows read values, plus zooms, 0 shows all again."""
    browser.run("document.getElementById('plot-loss').focus()")
    for _ in range(2):
        browser.key("ArrowRight")
    text = browser.run("document.getElementById('plot-loss').getAttribute('aria-valuetext')")
    first = records[0]
    key = "evaluation_loss" if "evaluation_loss" in first else "loss"
    expect(text.startswith(f"update {records[1]['update']}:"), text)
    expect(f"{number(records[1][key]):.6g}" in text, text, records[1][key])
    path = "document.querySelector('#plot-loss g[data-item=\"0\"] .curve').getAttribute('d')"
    whole = browser.run(path)
    browser.key("+")
    expect(browser.run(path) != whole, "plus does not zoom")
    browser.key("0")
    expect(browser.run(path) == whole, "0 does not show all")
    browser.key("Escape")


def check_drag(browser):
    """Dragging across a plot zooms into what was marked; a double click goes back."""
    browser.run("document.getElementById('plot-norm').scrollIntoView({block: 'center', behavior: 'instant'})")
    box = browser.run("(() => { const b = document.querySelector('#plot-norm .overlay')"
                      ".getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()")
    path = "document.querySelector('#plot-norm g[data-item=\"0\"] .curve').getAttribute('d')"
    whole = browser.run(path)
    y = box[1] + box[3] / 2
    browser.mouse("mousePressed", box[0] + box[2] * 0.2, y)
    browser.mouse("mouseMoved", box[0] + box[2] * 0.5, y)
    expect(browser.run("!document.querySelector('.readout:not([hidden])')") is False, "no values are shown")
    browser.mouse("mouseReleased", box[0] + box[2] * 0.5, y)
    expect(browser.run(path) != whole, "dragging does not zoom")
    browser.run("document.querySelector('#plot-norm .overlay').dispatchEvent(new MouseEvent('dblclick'))")
    expect(browser.run(path) == whole, "a double click does not show all")


def check_heat(browser, runs):
    """The rows of the gradient norm add up to the ledger's norm of the whole gradient."""
    if not browser.run("!!document.getElementById('heat')"):
        return
    browser.run("document.querySelector('#layers details').open = true")
    time.sleep(0.2)
    rows = browser.run("[...document.querySelectorAll('#layers details tr')]"
                       ".map((tr) => [...tr.children].map((c) => c.textContent))")
    index = browser.run("JSON.parse(document.getElementById('data').textContent).motion.run")
    records = {r["update"]: r for r in list(runs.values())[index]}
    for column, update in enumerate(rows[0][1:], start=1):
        cells = [row[column].replace("−", "-") for row in rows[1:]]
        norm = number(records[int(update)]["gradient_norm"])
        if "–" in cells or not numpy.isfinite(norm):
            continue
        total = sum(float(c) ** 2 for c in cells) ** 0.5
        # Each cell has four digits.
        expect(abs(total / norm - 1) < 1e-3, f"update {update}: rows add up to {total}, the norm is {norm}")
    cells = browser.run("document.querySelectorAll('#heat .heatcell').length")
    expect(cells == (len(rows) - 1) * (len(rows[0]) - 1), "cells:", cells)
    browser.run("document.getElementById('heat').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowDown")
    expect("update" in browser.run("document.getElementById('heat-value').textContent"), "no cell is read")
    for choice in ("heat-diagnostic", "heat-change", "heat-kind"):
        options = browser.run(f"[...document.getElementById('{choice}').options].map((o) => o.value)")
        for option in options[1:] + options[:1]:
            browser.run(f"(() => {{ const s = document.getElementById('{choice}');"
                        f" s.value = {json.dumps(option)}; s.dispatchEvent(new Event('change')); }})()")
            expect("NaN" not in browser.run("document.getElementById('heat').innerHTML"), choice, option)


def check_page(browser, runs):
    """What holds at every width, in the light and in the dark."""
    wide = browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    expect(wide <= 0, f"the page is {wide} pixels wider than the window")
    expect(browser.run("typeof window.hacked") == "undefined", "text of the data was run as a script")
    unnamed = browser.run("""[...document.querySelectorAll('select, input, button, [tabindex]')].filter((e) =>
        !(e.textContent.trim() || e.getAttribute('aria-label') || (e.labels && e.labels.length))).length""")
    expect(unnamed == 0, unnamed, "controls have no name")
    expect("NaN" not in browser.run("document.querySelector('main').innerHTML"), "a NaN is drawn")


def check(page, log):
    runs = read_log(log)
    browser = Browser()
    try:
        seconds = None
        for width, height, dark, mobile in ((1280, 900, False, False), (390, 844, True, True),
                                            (1280, 900, True, False), (390, 844, False, True)):
            browser.size(width, height, dark, mobile)
            taken = browser.open(page)
            seconds = seconds or taken
            check_page(browser, runs)
            if mobile:
                continue
            first = next(iter(runs.values()))
            evaluated = all("evaluation_loss" in r for records in runs.values() for r in records)
            losses = [number(r["evaluation_loss" if evaluated else "loss"]) for r in first]
            norms = [number(r["gradient_norm"]) for r in first]
            if numpy.isfinite(losses).all():
                check_curve(browser, "plot-loss", 0, losses, False)
            if numpy.isfinite(norms).all():
                check_curve(browser, "plot-norm", 0, norms, True)
            for item in range(min(2, browser.run("document.querySelectorAll('.legend input').length"))):
                check_pixels(browser, "plot-loss", item)
                check_pixels(browser, "plot-norm", item)
            check_keys(browser, first)
            check_drag(browser)
            check_heat(browser, runs)
            check_numbers(browser, runs)
        expect(not browser.complaints, "the console says:", browser.complaints)
        ours = "file://" + os.path.abspath(page)
        others = [r for r in browser.requests if r != ours and not r.startswith(("data:", "blob:"))
                  and urllib.request.unquote(r) != ours]
        expect(not others, "the page asked for", others)
        print(f"opened in {seconds:.2f} s")
    finally:
        browser.close()


def measure(page):
    browser = Browser()
    try:
        browser.size(1280, 900)
        seconds = sorted(browser.open(page) for _ in range(3))
        inside = browser.run("document.documentElement.dataset.drawn")
        expect(not browser.complaints, "the console says:", browser.complaints)
        print(f"opened in {seconds[1]:.2f} s (of three), its script ran {inside} ms; "
              f"{os.path.getsize(page) / 1e6:.1f} MB")
    finally:
        browser.close()


def pictures(page, folder):
    os.makedirs(folder, exist_ok=True)
    browser = Browser()
    try:
        for width, mobile in ((1280, False), (390, True)):
            for dark in (False, True):
                browser.size(width, 900, dark, mobile)
                browser.open(page)
                name = f"{width}-{'dark' if dark else 'light'}.png"
                open(os.path.join(folder, name), "wb").write(browser.picture(whole=True))
        browser.size(1280, 900)
        browser.open(page)
        pdf = browser.call("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69)
        open(os.path.join(folder, "print.pdf"), "wb").write(base64.b64decode(pdf["data"]))
        expect(not browser.complaints, "the console says:", browser.complaints)
    finally:
        browser.close()


def main():
    commands = {"check": check, "time": measure, "pictures": pictures}
    if len(sys.argv) < 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    try:
        commands[sys.argv[1]](*sys.argv[2:])
    except AssertionError as error:
        print(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
