// The page of `retrace report`: draws the data that stand in the element #data (cmd/report_data.h).
// All text of the data goes through textContent; nothing is parsed as HTML. Needs D3 5.
"use strict";
(() => {
  const started = performance.now();
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main");
  const count = {Figure: 0, Table: 0};

  // ---- Elements and text ------------------------------------------------------------------------

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (name === "on") for (const [event, f] of Object.entries(value)) node.addEventListener(event, f);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  }

  function section(id, title, ...children) {
    const node = el("section", {id, "aria-labelledby": id + "-title"},
                    el("h2", {id: id + "-title"}, title), ...children);
    main.append(node);
    document.getElementById("contents").append(el("a", {href: "#" + id}, title));
    return node;
  }

  const numbered = (what) => `${what} ${++count[what]}. `;
  const figcaption = (...text) => el("figcaption", {}, el("b", {}, numbered("Figure")), ...text);

  // Ledgers write numbers that are not finite as text.
  function number(x) {
    if (typeof x === "number") return x;
    return x === "inf" ? Infinity : x === "-inf" ? -Infinity : NaN;
  }
  const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  const minus = (text) => text.replace(/-/g, "−").replace(/e−/, "e-");
  function short(x, digits = 4) {  // for people; tooltips of the ledger's numbers have all digits
    if (!Number.isFinite(x)) return Number.isNaN(x) ? "not a number" : x > 0 ? "∞" : "−∞";
    if (x === 0) return "0";
    const size = Math.abs(x);
    if (size >= 1e5 || size < 1e-3) return minus(x.toExponential(Math.max(0, digits - 2)).replace(/\.?0*e\+?/, "e"));
    return minus(String(Number(x.toPrecision(digits))));
  }
  const fixed = (x, digits = 3) => (Number.isFinite(x) ? minus(x.toFixed(digits)) : short(x));
  const list = (words) => words.length < 2 ? words.join("")
      : words.slice(0, -1).join(", ") + " and " + words[words.length - 1];

  // ---- What is drawn: runs, bands of replicas, arms of an experiment ----------------------------

  const runs = data.runs.map((run) => {
    const curves = {};
    for (const name of ["loss", "evaluation_loss", "gradient_norm", "clip", "lr"]) {
      if (run.curves[name]) curves[name] = run.curves[name].map(number);
    }
    return {...run, first: run.curves.first, actions: run.curves.actions, curves,
            length: curves.loss.length};
  });
  // Adam's update RMS of all tensors, where states are kept.
  for (const map of data.motion ? data.motion.heat : []) {
    if (!map.states) continue;
    const elements = d3.sum(data.motion.models[map.model].elements), {first, last, change} = map.states;
    runs[map.run].rms = {first, values: d3.range(first, last + 1).map((k) =>
        Math.sqrt(d3.sum(change, (row) => number(row[k - first]) ** 2) / elements) / number(map.lr[k - map.first]))};
  }
  const evaluated = runs.length > 0 && runs.every((run) => run.length === 0 || run.curves.evaluation_loss);
  const experiment = data.experiment;

  const kHues = 7;
  const kDashes = ["", "8 3", "3 3", "11 3 2 3"];
  const items = [];  // what the legend lists
  function addItem(item) {
    const i = items.length;
    item.color = `var(--s${i === 0 ? 0 : 1 + (i - 1) % kHues})`;
    item.dash = i === 0 ? "" : kDashes[(i - 1) % kDashes.length];
    item.shown = true;
    item.main = i === 0;
    items.push(item);
  }
  const grouped = new Set(data.groups.flatMap((group) => group.runs));
  runs.forEach((run, i) => {
    if (!grouped.has(i)) addItem({kind: "run", name: run.name, runs: [i]});
  });
  for (const group of data.groups) {
    addItem({kind: "group", name: `${group.name} (${group.runs.length} replicas)`, runs: group.runs,
             noise: group.noise});
  }
  for (const arm of experiment ? experiment.arms : []) {
    addItem({kind: "arm", name: `${arm.name} (${arm.replicas.length} replicas)`, runs: [], arm});
  }

  // Least, median and largest value by update of several curves.
  function bandOf(curves) {
    if (curves.length === 0) return null;
    const first = d3.min(curves, (c) => c.first), last = d3.max(curves, (c) => c.first + c.values.length - 1);
    const band = {first, low: [], median: [], high: []};
    for (let k = first; k <= last; ++k) {
      const at = curves.map((c) => c.values[k - c.first]).filter((v) => v !== undefined && !Number.isNaN(v));
      at.sort(d3.ascending);
      const middle = at.length >> 1;
      band.low.push(at.length ? at[0] : NaN);
      band.high.push(at.length ? at[at.length - 1] : NaN);
      band.median.push(!at.length ? NaN : at.length % 2 ? at[middle] : (at[middle - 1] + at[middle]) / 2);
    }
    return band;
  }

  // The curves of one quantity: for each item its members and, of replicas, their band.
  function seriesOf(quantity) {
    return items.map((item) => {
      let curves;
      if (item.kind === "arm") {
        curves = quantity !== "evaluation_loss" ? [] : item.arm.replicas.map(
            (r) => ({first: experiment.first, values: r.evaluation_losses.map(number)}));
      } else {
        curves = quantity === "update_rms" ? item.runs.map((i) => runs[i].rms).filter(Boolean)
            : item.runs.filter((i) => runs[i].curves[quantity]).map((i) => ({first: runs[i].first, values: runs[i].curves[quantity]}));
      }
      curves = curves.filter((c) => c.values.length > 0);
      return {item, curves, band: item.kind === "run" ? null : bandOf(curves)};
    });
  }

  // ---- Curves by update -------------------------------------------------------------------------

  const whole = (() => {
    let first = Infinity, last = -Infinity;
    for (const run of runs) {
      if (run.length === 0) continue;
      first = Math.min(first, run.first);
      last = Math.max(last, run.first + run.length - 1);
    }
    for (const item of items) {
      if (item.kind !== "arm") continue;
      first = Math.min(first, experiment.first);
      last = Math.max(last, experiment.first + (d3.max(item.arm.replicas, (r) => r.evaluation_losses.length) || 1) - 1);
    }
    return first <= last ? [first, Math.max(last, first + 1)] : [0, 1];
  })();
  const spike = data.motion && data.motion.spike && data.motion.spike.is_spike ? data.motion.spike : null;
  const view = {domain: whole.slice(), cursor: null, panels: []};

  function setDomain(first, last) {
    const least = Math.min(4, whole[1] - whole[0]);
    if (last - first < least) {
      const middle = (first + last) / 2;
      [first, last] = [middle - least / 2, middle + least / 2];
    }
    if (first < whole[0]) [first, last] = [whole[0], Math.min(whole[1], last + whole[0] - first)];
    if (last > whole[1]) [first, last] = [Math.max(whole[0], first + whole[1] - last), whole[1]];
    view.domain = [first, last];
    for (const panel of view.panels) panel.draw();
    for (const panel of view.panels) panel.drawCursor();
  }
  function zoomBy(factor) {
    const [a, b] = view.domain;
    const middle = view.cursor !== null && view.cursor >= a && view.cursor <= b ? view.cursor : (a + b) / 2;
    setDomain(middle - (middle - a) * factor, middle + (b - middle) * factor);
  }
  function setCursor(update, panel) {
    view.cursor = update === null ? null : Math.max(whole[0], Math.min(whole[1], Math.round(update)));
    if (view.cursor !== null) {
      const [a, b] = view.domain, width = b - a;
      if (view.cursor < a) setDomain(view.cursor, view.cursor + width);
      if (view.cursor > b) setDomain(view.cursor - width, view.cursor);
    }
    for (const p of view.panels) p.drawCursor(p === panel);
  }

  // A path through the points in view; values that can not be drawn leave a gap. Of more points than
  // pixels, the least and the largest of each pixel are kept.
  function linePath(first, values, x, y, usable) {
    const [a, b] = x.domain();
    const from = Math.max(0, Math.floor(a) - 1 - first), to = Math.min(values.length - 1, Math.ceil(b) + 1 - first);
    const step = Math.max(1, Math.floor((to - from) / Math.max(1, x.range()[1] - x.range()[0])));
    let path = "", pen = "M";
    const add = (i) => {
      const v = values[i];
      if (!usable(v)) { pen = "M"; return; }
      path += pen + x(first + i).toFixed(1) + " " + y(v).toFixed(1);
      pen = "L";
    };
    for (let i = from; i <= to; i += step) {
      if (step === 1) { add(i); continue; }
      let low = i, high = i;
      for (let j = i; j < Math.min(i + step, to + 1); ++j) {
        if (!usable(values[j])) { low = high = j; break; }
        if (values[j] < values[low]) low = j;
        if (values[j] > values[high]) high = j;
      }
      add(Math.min(low, high));
      if (low !== high) add(Math.max(low, high));
    }
    return path;
  }

  function areaPath(band, x, y, usable) {
    const [a, b] = x.domain();
    const points = d3.range(Math.max(0, Math.floor(a) - 1 - band.first),
                            Math.min(band.low.length - 1, Math.ceil(b) + 1 - band.first) + 1);
    return d3.area().defined((i) => usable(band.low[i]) && usable(band.high[i]))
        .x((i) => x(band.first + i)).y0((i) => y(band.low[i])).y1((i) => y(band.high[i]))(points);
  }

  class Panel {
    constructor(host, {id, title, quantities, log, height, digits}) {
      Object.assign(this, {id, quantities, log, height, digits, quantity: quantities[0].key});
      this.series = {};
      this.word = el("span", {}, title);
      const heading = el("h3", {}, this.word);
      if (quantities.length > 1) {
        heading.append(el("label", {class: "onscreen"}, "show ", el("select", {
          id: id + "-quantity", on: {change: (e) => { this.quantity = e.target.value; this.draw(); this.drawCursor(); }}
        }, quantities.map((q) => el("option", {value: q.key}, q.name)))));
      }
      heading.append(el("label", {class: "onscreen"}, el("input", {
        type: "checkbox", id: id + "-log", checked: log,
        on: {change: (e) => { this.log = e.target.checked; this.draw(); this.drawCursor(); }}
      }), "log scale"));
      this.readout = el("div", {class: "readout", hidden: true});
      this.plot = el("div", {
        class: "plot", id, tabindex: 0, role: "slider", "aria-valuemin": whole[0], "aria-valuemax": whole[1],
        "aria-valuenow": whole[0],
        "aria-label": `${title} by update. Arrow keys go through the updates, plus and minus zoom, 0 shows all.`,
        on: {keydown: (e) => this.key(e), blur: () => setCursor(null)}
      });
      host.append(el("div", {class: "panel"}, heading, this.plot, this.readout));
      view.panels.push(this);
      new ResizeObserver(() => {
        if (Math.abs(this.plot.clientWidth - this.width) > 1) { this.draw(); this.drawCursor(); }
      }).observe(this.plot);
    }

    name() { return this.quantities.find((q) => q.key === this.quantity).name; }

    key(event) {
      const [a, b] = view.domain;
      const at = view.cursor === null ? Math.round(a) - 1 : view.cursor;
      const far = Math.max(1, Math.round((b - a) / 10));
      const act = {
        ArrowRight: () => setCursor(at + 1, this), ArrowLeft: () => setCursor(Math.max(at - 1, whole[0]), this),
        PageUp: () => setCursor(at + far, this), PageDown: () => setCursor(Math.max(at - far, whole[0]), this),
        Home: () => setCursor(whole[0], this), End: () => setCursor(whole[1], this),
        "+": () => zoomBy(.6), "=": () => zoomBy(.6), "-": () => zoomBy(1 / .6), "0": () => setDomain(...whole),
        Escape: () => setCursor(null)
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    }

    usable(v) { return Number.isFinite(v) && (!this.log || v > 0); }

    visible() {
      this.series[this.quantity] = this.series[this.quantity] || seriesOf(this.quantity);
      return this.series[this.quantity].filter((s) => s.item.shown && s.curves.length > 0);
    }

    yScale(drawn, inner) {
      let low = Infinity, high = -Infinity;
      const [a, b] = view.domain;
      const see = (first, values) => {
        const from = Math.max(0, Math.ceil(a) - first), to = Math.min(values.length - 1, Math.floor(b) - first);
        for (let i = from; i <= to; ++i) {
          if (!this.usable(values[i])) continue;
          if (values[i] < low) low = values[i];
          if (values[i] > high) high = values[i];
        }
      };
      for (const s of drawn) for (const c of s.curves) see(c.first, c.values);
      if (low > high) [low, high] = this.log ? [1, 10] : [0, 1];
      if (this.log) {
        const pad = Math.max(1.08, Math.pow(high / low, .05));
        return d3.scaleLog().domain([low / pad, high * pad]).range([inner, 0]);
      }
      const pad = high > low ? (high - low) * .06 : Math.abs(high) * .1 || .5;
      return d3.scaleLinear().domain([low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad]).range([inner, 0]);
    }

    draw() {
      const width = this.width = Math.max(260, this.plot.clientWidth), height = this.height;
      const drawn = this.visible();
      // The same for all panels, so that their updates stand one under the other.
      const shown = items.filter((item) => item.shown).length;
      const labelled = width > 720 && shown > 1 && shown <= 8;
      const margin = {top: 8, right: labelled ? 150 : 14, bottom: 24, left: 48};
      const inner = {w: width - margin.left - margin.right, h: height - margin.top - margin.bottom};
      const x = this.x = d3.scaleLinear().domain(view.domain).range([0, inner.w]);
      const y = this.y = this.yScale(drawn, inner.h);
      this.margin = margin;
      const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("aria-hidden", "true");
      const root = svg.append("g").attr("transform", `translate(${margin.left},${margin.top})`);
      this.drawAxes(root, x, y, inner);
      const clip = this.id + "-clip";
      root.append("clipPath").attr("id", clip).append("rect").attr("x", -2).attr("y", -4)
          .attr("width", inner.w + 4).attr("height", inner.h + 8);
      const body = root.append("g").attr("clip-path", `url(#${clip})`);
      if (spike) this.drawSpike(body, x, inner);
      for (const s of drawn.slice().reverse()) this.drawSeries(body, s, x, y, inner, drawn.length);
      if (labelled && drawn.length > 0) this.drawLabels(root, drawn, x, y, inner);
      this.cursorLine = root.append("line").attr("class", "cursor").attr("y2", inner.h).style("display", "none");
      this.dots = root.append("g");
      this.drawOverlay(root, x, inner);
      this.plot.replaceChildren(svg.node());
    }

    drawAxes(root, x, y, inner) {
      let ticks = this.log ? y.ticks() : y.ticks(Math.max(3, inner.h / 40));
      if (this.log) {
        const decades = Math.log10(y.domain()[1] / y.domain()[0]);
        const leading = (t) => Math.round(t / Math.pow(10, Math.floor(Math.log10(t) + 1e-9)));
        if (decades > 6) ticks = ticks.filter((t) => leading(t) === 1 && Math.round(Math.log10(t)) % 2 === 0);
        else if (decades > 2) ticks = ticks.filter((t) => leading(t) === 1);
        else if (decades > .8) ticks = ticks.filter((t) => [1, 2, 5].includes(leading(t)));
        if (ticks.length < 2) ticks = d3.scaleLinear().domain(y.domain()).ticks(4).filter((t) => t > 0);
      }
      root.append("g").selectAll("line").data(ticks).join("line").attr("class", "gridline")
          .attr("x2", inner.w).attr("y1", (t) => y(t)).attr("y2", (t) => y(t));
      root.append("g").selectAll("text").data(ticks).join("text").attr("x", -7).attr("dy", "0.32em")
          .attr("y", (t) => y(t)).attr("text-anchor", "end").text((t) => short(t, 6));
      const axis = d3.axisBottom(x).ticks(Math.min(10, Math.max(2, inner.w / 70))).tickSizeOuter(0)
          .tickFormat((t) => (Number.isInteger(t) ? String(t) : ""));
      root.append("g").attr("class", "axis").attr("transform", `translate(0,${inner.h})`).call(axis);
      root.append("text").attr("x", -7).attr("y", inner.h + 16).attr("text-anchor", "end").attr("class", "strong").text("update");
    }

    drawSpike(body, x, inner) {
      body.append("line").attr("class", "spikeline").attr("x1", x(spike.onset)).attr("x2", x(spike.onset))
          .attr("y1", 0).attr("y2", inner.h);
      if (this !== view.panels[0]) return;
      const right = x(spike.onset) > inner.w * .75;
      body.append("text").attr("class", "spikeword").attr("x", x(spike.onset) + (right ? -5 : 5)).attr("y", 10)
          .attr("text-anchor", right ? "end" : "start").text(`rise begins, update ${spike.onset}`);
    }

    drawSeries(body, s, x, y, inner, many) {
      const usable = (v) => this.usable(v);
      const g = body.append("g").attr("data-item", items.indexOf(s.item)).attr("data-name", s.item.name);
      if (s.band) {
        g.append("path").attr("class", "area").attr("fill", s.item.color).attr("d", areaPath(s.band, x, y, usable));
        const path = s.curves.map((c) => linePath(c.first, c.values, x, y, usable)).join("");
        g.append("path").attr("class", "curve thin").attr("stroke", s.item.color).attr("d", path);
        g.append("path").attr("class", "curve median").attr("stroke", s.item.color)
            .attr("stroke-dasharray", s.item.dash || null).attr("d", linePath(s.band.first, s.band.median, x, y, usable));
        return;
      }
      const c = s.curves[0];
      g.append("path").attr("class", "curve" + (s.item.main ? " main" : "")).attr("stroke", s.item.color)
          .attr("stroke-dasharray", s.item.dash || null).attr("d", linePath(c.first, c.values, x, y, usable));
      const [a, b] = x.domain();
      if (b - a <= 80 && many <= 6) {
        const points = d3.range(c.values.length).filter((i) => usable(c.values[i]) && c.first + i >= a && c.first + i <= b);
        g.selectAll("circle").data(points).join("circle").attr("class", "dot").attr("r", s.item.main ? 2.6 : 2.1)
            .attr("fill", s.item.color).attr("cx", (i) => x(c.first + i)).attr("cy", (i) => y(c.values[i]));
      }
      // Values that are not finite: a cross at the top.
      const broken = d3.range(c.values.length).filter((i) => !Number.isFinite(c.values[i]));
      g.selectAll("text").data(broken).join("text").attr("class", "missing").attr("text-anchor", "middle")
          .attr("x", (i) => x(c.first + i)).attr("y", 9).text("✕");
    }

    // Names at the right end, moved apart.
    drawLabels(root, drawn, x, y, inner) {
      const ends = drawn.map((s) => {
        const first = s.band ? s.band.first : s.curves[0].first, values = s.band ? s.band.median : s.curves[0].values;
        let i = Math.min(values.length - 1, Math.floor(x.domain()[1]) - first);
        while (i > 0 && !this.usable(values[i])) --i;
        return {s, x: x(first + i), y: this.usable(values[i]) ? y(values[i]) : 0};
      }).sort((p, q) => p.y - q.y);
      ends.forEach((e) => { e.at = Math.max(4, Math.min(inner.h - 2, e.y)); });
      for (let i = 1; i < ends.length; ++i) ends[i].at = Math.max(ends[i].at, ends[i - 1].at + 13);
      const over = ends[ends.length - 1].at - inner.h;
      if (over > 0) {
        ends[ends.length - 1].at -= over;
        for (let i = ends.length - 2; i >= 0; --i) ends[i].at = Math.min(ends[i].at, ends[i + 1].at - 13);
      }
      const g = root.append("g").selectAll("g").data(ends).join("g");
      g.append("path").attr("fill", "none").attr("stroke", (e) => e.s.item.color).attr("opacity", .5)
          .attr("d", (e) => `M${Math.min(e.x, inner.w)} ${e.y}L${inner.w + 8} ${e.at}`)
          .style("display", (e) => (e.x < inner.w - 30 ? "none" : null));
      g.append("text").attr("x", inner.w + 11).attr("y", (e) => e.at).attr("dy", "0.32em")
          .style("fill", (e) => e.s.item.color).style("font-weight", 600)
          .text((e) => (e.s.item.name.length > 21 ? e.s.item.name.slice(0, 20) + "…" : e.s.item.name));
    }

    drawOverlay(root, x, inner) {
      const selection = root.append("rect").attr("class", "selection").attr("height", inner.h).style("display", "none");
      const overlay = root.append("rect").attr("class", "overlay").attr("width", inner.w).attr("height", inner.h).node();
      let from = null;
      const on = (name, act) => overlay.addEventListener(name, act);
      const at = (event) => {
        const box = overlay.getBoundingClientRect();
        return Math.max(0, Math.min(inner.w, (event.clientX - box.left) * inner.w / box.width));
      };
      const stop = () => { from = null; selection.style("display", "none"); };
      on("pointerdown", (event) => {
        from = at(event);
        overlay.setPointerCapture(event.pointerId);
        setCursor(x.invert(from), this);
      });
      on("pointermove", (event) => {
        const to = at(event);
        setCursor(x.invert(to), this);
        if (from === null || Math.abs(to - from) < 8) return;
        selection.style("display", null).attr("x", Math.min(from, to)).attr("width", Math.abs(to - from));
      });
      on("pointerup", (event) => {
        const to = at(event), begin = from;
        stop();
        if (begin !== null && Math.abs(to - begin) >= 8) {
          setDomain(x.invert(Math.min(begin, to)), x.invert(Math.max(begin, to)));
        }
      });
      on("pointercancel", stop);
      on("pointerleave", () => { if (from === null && document.activeElement !== this.plot) setCursor(null); });
      on("dblclick", () => setDomain(...whole));
    }

    // [{item, value, text}] at an update, largest first.
    valuesAt(update) {
      const rows = [];
      for (const s of this.visible()) {
        const first = s.band ? s.band.first : s.curves[0].first;
        const value = (s.band ? s.band.median : s.curves[0].values)[update - first];
        if (value === undefined) continue;
        const text = s.band
            ? `${short(value)} (${short(s.band.low[update - first])} … ${short(s.band.high[update - first])})`
            : short(value, 6);
        rows.push({item: s.item, value, text});
      }
      return rows.sort((p, q) => d3.descending(p.value, q.value));
    }

    drawCursor(active) {
      const update = view.cursor, hidden = update === null || update < view.domain[0] || update > view.domain[1];
      this.cursorLine.style("display", hidden ? "none" : null);
      this.readout.hidden = hidden || !active;
      if (hidden) { this.dots.selectAll("*").remove(); return; }
      const rows = this.valuesAt(update), px = this.x(update);
      this.cursorLine.attr("x1", px).attr("x2", px);
      this.dots.selectAll("circle").data(rows.filter((r) => this.usable(r.value))).join("circle").attr("r", 4)
          .attr("fill", (r) => r.item.color).attr("stroke", "var(--page)").attr("cx", px).attr("cy", (r) => this.y(r.value));
      if (!active) return;
      const kMost = 14;
      this.readout.replaceChildren(
          el("b", {}, `update ${update}`),
          ...rows.slice(0, kMost).map((r) => el("div", {}, el("span", {class: "name"}, swatch(r.item), " ", r.item.name),
                                                el("span", {class: "value"}, r.text))),
          ...(rows.length > kMost ? [el("div", {}, `and ${rows.length - kMost} more`)] : []),
          ...(rows.length === 0 ? [el("div", {}, "no values")] : []));
      const scale = this.plot.clientWidth / this.width, left = (px + this.margin.left) * scale;
      const box = this.readout.offsetWidth, room = this.plot.clientWidth;
      this.readout.style.left = `${Math.max(0, left + 14 + box > room ? left - box - 14 : left + 14)}px`;
      this.readout.style.top = `${this.plot.offsetTop + 10}px`;
      this.plot.setAttribute("aria-valuenow", update);
      this.plot.setAttribute("aria-valuetext",
                             `update ${update}: ` + rows.map((r) => `${r.item.name} ${r.text}`).join("; "));
    }
  }

  function swatch(item) {
    const svg = d3.create("svg").attr("class", "swatch").attr("viewBox", "0 0 27 11").attr("aria-hidden", "true");
    if (item.kind !== "run") {
      svg.append("rect").attr("width", 27).attr("height", 11).attr("fill", item.color).attr("fill-opacity", .25);
    }
    svg.append("line").attr("x2", 27).attr("y1", 5.5).attr("y2", 5.5).attr("stroke", item.color)
        .attr("stroke-width", item.main ? 2.6 : 2).attr("stroke-dasharray", item.dash || null);
    return svg.node();
  }

  function legend() {
    const box = el("fieldset", {class: "legend", "aria-label": "Curves that are shown"});
    for (const item of items) {
      box.append(el("label", {}, el("input", {type: "checkbox", checked: true, on: {change: (e) => {
        item.shown = e.target.checked;
        for (const panel of view.panels) { panel.draw(); panel.drawCursor(); }
      }}}), swatch(item), el("span", {class: "name"}, item.name)));
    }
    return box;
  }

  function curves() {
    const figure = el("figure");
    const button = (text, act) => el("button", {type: "button", on: {click: act}}, text);
    const bar = el("div", {class: "bar onscreen"}, button("Whole range", () => setDomain(...whole)),
                   data.motion && data.motion.spike ? button("Around the rise", () =>
                       setDomain(data.motion.first - 1, data.motion.last + 1)) : null,
                   button("Zoom in", () => zoomBy(.6)), button("Zoom out", () => zoomBy(1 / .6)));
    figure.append(bar, legend());
    section("curves", "Curves", figure);
    const both = [{key: "evaluation_loss", name: "evaluation loss"}, {key: "loss", name: "training loss"}];
    const arms = items.some((item) => item.kind === "arm");
    const losses = evaluated || arms ? (runs.length ? both : both.slice(0, 1)) : both.slice(1);
    const wide = window.innerWidth > 640;
    const panels = [new Panel(figure, {id: "plot-loss", title: "Loss, nats", quantities: losses, log: false, height: wide ? 300 : 240})];
    if (runs.length > 0) {
      const more = (id, title, key, log, height) => panels.push(
          new Panel(figure, {id, title, quantities: [{key, name: title}], log, height}));
      more("plot-norm", "Gradient norm before clipping", "gradient_norm", true, wide ? 230 : 200);
      more("plot-clip", "Clip factor", "clip", true, 130);
      more("plot-lr", "Learning rate", "lr", false, 130);
      if (runs.some((run) => run.rms)) more("plot-rms", "Adam update RMS, in learning rates", "update_rms", true, 150);
    }
    const bands = items.filter((item) => item.kind !== "run").length > 0;
    figure.append(figcaption(
        `${runs.length ? "Loss, gradient norm, clip factor and learning rate" : "Loss"}${runs.length > 1 ? " of all runs" : ""}, aligned by update. The loss of an update is that at the state before it; `,
        "the evaluation loss is that of one fixed batch. ",
        runs.some((run) => run.rms) ? "Adam’s update RMS is the root mean square of the parameters’ change in units of the learning rate, weight decay included, where states are kept around the rise. " : "",
        bands ? "Of replicas, which differ in the seed of a small noise alone, the heavy line is the median, the band reaches from the least to the largest, and each thin line is one replica. " : "",
        spike ? "The dashed upright line is where the examined rise begins. " : "",
        el("span", {class: "onscreen"}, "Drag across a plot to zoom, double-click to see all; with the keyboard: arrows, plus, minus, 0.")));
    for (const panel of panels) { panel.draw(); panel.drawCursor(); }
  }

  // ---- Tables -----------------------------------------------------------------------------------

  // columns: [{title, text: left-aligned, cls}]; rows of cells: text or nodes; the first is a heading.
  function table(caption, columns, rows, id) {
    return el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Table"},
      el("table", {id}, el("caption", {}, el("span", {}, el("b", {}, numbered("Table")), caption)),
        el("thead", {}, el("tr", {}, columns.map((c) => el("th", {scope: "col", class: c.text ? "text" : null}, c.title)))),
        el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => i === 0
          ? el("th", {scope: "row"}, cell)
          : el("td", {class: [columns[i].text ? "text" : "", columns[i].cls || ""].join(" ").trim() || null}, cell)))))));
  }

  const changesOf = (run) => (run.lineage ? run.lineage.interventions : []);
  function lineageText(run) {
    if (!run.lineage) return "recorded";
    const parent = run.lineage.run === null ? run.lineage.parent : runs[run.lineage.run].name;
    return `${parent}@${run.lineage.position}`;
  }
  const itemOfRun = (index) => items.find((item) => item.runs.includes(index));

  // The index of the first value that no other one is better than; undefined: none is finite.
  function bestOf(values, better) {
    let best;
    values.forEach((v, i) => { if (Number.isFinite(v) && (best === undefined || better(v, values[best]))) best = i; });
    return best;
  }

  function runTable() {
    const rows = runs.map((run, i) => {
      const loss = run.curves.evaluation_loss || run.curves.loss;
      const least = bestOf(loss, (a, b) => a < b);
      const at = (k, digits) => (k === undefined ? "–" : `${fixed(loss[k], digits)} @${run.first + k}`);
      const norm = run.curves.gradient_norm, most = bestOf(norm, (a, b) => a > b);
      const code = changesOf(run).map((text) => el("code", {class: "sub"}, text));
      return [[swatch(itemOfRun(i)), " ", run.name, el("span", {class: "sub"}, lineageText(run))],
              code.length ? code : "nothing", run.length ? `${run.first}–${run.first + run.length - 1}` : "none",
              at(loss.length ? loss.length - 1 : undefined, 3), at(least, 3),
              run.facts.rise > 0 ? `${fixed(run.facts.rise, 3)} @${run.facts.rise_from}–${run.facts.rise_to}` : "none",
              most === undefined ? "–" : `${short(norm[most])} @${run.first + most}`,
              el("code", {title: run.last_state}, run.last_state.slice(0, 12))];
    });
    return table(`The runs. Losses (nats) are those of the ${evaluated ? "evaluation batch" : "evaluation batch where a run has one, else of training"}, as value @update. ` +
      "The largest rise is counted from the least loss before it. A state's digest stands for every bit of parameters, moments and counters.",
      [{title: "run", text: true}, {title: "changed", text: true, cls: "wrap"}, {title: "updates"}, {title: "last loss"}, {title: "least"},
       {title: "largest rise"}, {title: "|g|, most"}, {title: "last state", text: true}], rows, "runs-table");
  }

  // ---- Verdicts ---------------------------------------------------------------------------------

  const kVerdicts = {
    "control": ["", ""], "removes": ["good", "✓ "], "shrinks": ["good", "▾ "], "delays": ["late", "▸ "],
    "worsens": ["bad", "▴ "], "within noise": ["", "≈ "]
  };
  function testedP(arm) {
    const p = {removes: arm.p_below, shrinks: arm.p_below, worsens: arm.p_above, delays: arm.p_later}[arm.verdict];
    return number(p === undefined ? Math.min(number(arm.p_below), number(arm.p_above), number(arm.p_later)) : p);
  }

  // One mark a replica; those that are not finite stand at the end.
  function strip(item, scale, threshold, control) {
    const width = 230, height = 30, x = d3.scaleLinear().domain([0, scale]).range([8, width - 26]);
    const jumps = item.arm.replicas.map((r) => number(r.jump));
    const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("role", "img").style("max-width", width + "px")
        .attr("aria-label", "jumps of the replicas: " + jumps.map((j) => short(j, 3)).join(", "));
    svg.append("line").attr("class", "gridline").attr("x1", x(0)).attr("x2", x(scale)).attr("y1", height / 2).attr("y2", height / 2);
    if (threshold <= scale) {
      svg.append("line").attr("class", "spikeline").attr("x1", x(threshold)).attr("x2", x(threshold)).attr("y1", 2).attr("y2", height - 2);
    }
    svg.append("line").attr("stroke", "var(--soft)").attr("x1", x(control)).attr("x2", x(control)).attr("y1", 2).attr("y2", height - 2);
    jumps.forEach((jump, i) => {
      svg.append("circle").attr("class", "replica").attr("r", 4).attr("fill", item.color).attr("fill-opacity", .65)
          .attr("stroke", "var(--page)").attr("cx", Number.isFinite(jump) ? x(Math.min(jump, scale)) : width - 10)
          .attr("cy", height / 2 + ((i * 5) % 7 - 3) * 2.2)
          .append("title").text(`seed ${item.arm.replicas[i].seed}: ${short(jump, 5)} nats`);
    });
    return svg.node();
  }

  function verdicts() {
    if (!experiment) return;
    if (!experiment.control_equal) {
      section("verdicts", "Verdicts", el("p", {}, `No verdict: the control, replayed as recorded, differs from its recording at update ${experiment.differs_at}.`));
      return;
    }
    const arms = items.filter((item) => item.kind === "arm");
    const jumps = arms.flatMap((item) => item.arm.replicas.map((r) => number(r.jump))).filter(Number.isFinite);
    const scale = Math.max(d3.max(jumps) || 0, experiment.threshold * 1.2);
    const control = arms.length ? Math.min(number(arms[0].arm.median), scale) : 0;
    const rows = arms.map((item) => {
      const arm = item.arm, [tone, mark] = kVerdicts[arm.verdict] || ["", ""], is_control = arm.verdict === "control";
      const spiked = arm.replicas.filter((r) => Number.isFinite(number(r.spike))).length;
      const p = testedP(arm);
      return [[swatch(item), " ", arm.name, arm.hypothesis ? el("span", {class: "sub"}, arm.hypothesis) : null],
              arm.changes.length ? arm.changes.map((text) => el("code", {class: "sub"}, text)) : "nothing",
              strip(item, scale, experiment.threshold, control), `${spiked} of ${arm.replicas.length}`, fixed(number(arm.median)),
              is_control ? "" : (number(arm.delta) > 0 ? "+" : "") + fixed(number(arm.delta)), is_control ? "" : p < 1e-4 ? "< 0.0001" : fixed(p, 4),
              el("span", {class: "verdict " + tone}, mark + arm.verdict)];
    });
    const noise = experiment.sigma === undefined ? "Replicas differ in the seeds of the initial state and of the data’s order. "
        : `Replicas differ in a relative noise of ${short(number(experiment.sigma), 3)} on every parameter of the first state; its effect ` +
          (experiment.saturated ? "is saturated: more noise does not spread the control further. " : "is not known to be saturated. ");
    section("verdicts", "Verdicts", el("p", {},
        "Each arm changes one thing and is run several times with noise, because training near an instability is chaotic and one replay proves little. ",
        experiment.sigma === undefined ? "The control’s first replica was run twice with equal bits. "
            : "The control without noise equals the recording bit for bit. ", experiment.scope ? `Claims hold for ${experiment.scope}.` : ""),
      table(`Arms of ${experiment.file}, judged by the jump of the evaluation loss (nats above the least value before it) up to update ${experiment.horizon}. ` +
            `Each mark is one replica; the grey line is the control’s median, the dashed one the ${short(experiment.threshold)} nats from which a rise is a spike. ` +
            `p: one-sided exact rank permutation test against the control, Holm-adjusted over the arms; for “within noise” the least of the three tests. ` +
            `A claim needs p ≤ ${experiment.level ?? 0.05}` + (experiment.least_effect === undefined ? "." : ` and a difference of medians of ${short(number(experiment.least_effect), 3)} nats. `) + noise,
        [{title: "arm", text: true, cls: "wrap"}, {title: "changed", text: true, cls: "wrap"}, {title: `jumps, 0 to ${short(scale, 2)} nats`, text: true, cls: "strip"}, {title: "spiked", cls: "short"},
         {title: "median"}, {title: "Δ"}, {title: "p"}, {title: "verdict", text: true}], rows, "verdict-table"));
  }

  // ---- Which quantity moved first ---------------------------------------------------------------

  function movers() {
    const motion = data.motion;
    if (!motion || !motion.movers || !motion.spike) return;
    const {low, onset, peak, rise, is_spike} = motion.spike, run = runs[motion.run];
    const all = motion.movers.moved, turned = all.filter((m) => !m.trend), trends = all.length - turned.length;
    const chief = (m) => m.group === "loss" || ["gradient norm", "clip factor"].includes(m.quantity) || m.quantity.endsWith("of all tensors");
    turned.sort((a, b) => b.lead - a.lead || d3.descending(chief(a), chief(b)) || d3.ascending(a.quantity, b.quantity));
    const others = turned.filter((m) => !chief(m)), kMost = 14;
    const top = turned.filter((m) => chief(m) || others.indexOf(m) < kMost), rest = turned.filter((m) => !top.includes(m));
    const x = d3.scaleLinear().domain([motion.first, motion.last]).range([6, 194]);
    const line = (m) => {
      const svg = d3.create("svg").attr("viewBox", "0 0 200 20").style("max-width", "200px").style("min-width", "9rem").attr("aria-hidden", "true");
      svg.append("line").attr("class", "gridline").attr("x1", 6).attr("x2", 194).attr("y1", 10).attr("y2", 10);
      svg.append("line").attr("class", "spikeline").attr("x1", x(onset)).attr("x2", x(onset)).attr("y2", 20);
      svg.append("line").attr("x1", x(m.onset)).attr("x2", x(m.end)).attr("y1", 10).attr("y2", 10).attr("stroke", "var(--s1)").attr("stroke-width", 3);
      svg.append("circle").attr("cx", x(m.onset)).attr("cy", 10).attr("r", 4.5).attr("fill", "var(--s1)");
      return svg.node();
    };
    const row = (m) => [m.quantity, m.lead === 0 ? "with it" : m.lead > 0 ? `${plural(m.lead, "update")} before` : `${plural(-m.lead, "update")} after`, String(m.onset), line(m),
      `${short(number(m.value_turn))} → ${short(number(m.value_end))}` + (m.factor ? ` (×${short(number(m.value_end) / number(m.value_turn), 2)})` : "")];
    const columns = [{title: "quantity", text: true}, {title: "lead", cls: "short"}, {title: "began"},
                     {title: `updates ${motion.first}–${motion.last}`, text: true, cls: "strip"}, {title: "from → to"}];
    const node = section("first", "What moved first",
      el("p", {}, `The ${motion.evaluation ? "evaluation" : "training"} loss of ${run.name} rises by ${fixed(rise, 2)} nats from update ${low} to ${peak}` +
         `${is_spike ? "" : ` (less than the ${data.spike_nats} nats that count as a spike)`}; the rise begins at update ${onset}. ` +
         `Of ${motion.movers.asked} quantities, ${turned.length} turn and move while it lasts, ${trends} were on their way already when the window begins and tell nothing, and the others hardly move.`),
      el("p", {class: "note"}, "This is description, not a test: with so many quantities some lead by chance, and what moves first need not be a cause. Arms of an experiment say what is."),
      table(`When quantities of ${run.name} began to move. A quantity begins to move at the first update from which on it stays beyond a tenth of the way from where it turned to the extreme that it reaches while the loss rises (to update ${peak + 1}); the loss is measured by the same rule. ` +
            "The dot is the beginning, the bar the move, the dashed line the beginning of the loss’s rise. Counted are moves of a factor of 1.5, of 0.1 nats, of 5 % of the elements, of 0.2 in a cosine.",
            columns, top.map(row), "movers-table"));
    if (rest.length > 0) {
      node.append(el("details", {}, el("summary", {}, `${rest.length} more quantities`), table("The other quantities that moved.", columns, rest.map(row))));
    }
  }

  // ---- Heat maps --------------------------------------------------------------------------------

  const kDiagnostics = [
    {key: "norm", name: "gradient norm", says: "norm of the gradient before clipping", log: true},
    {key: "share", name: "share of the squared gradient norm", says: "how much of the squared norm of the whole gradient is this row’s", log: true, unit: "share"},
    {key: "rms", name: "Adam update RMS", says: "root mean square of the parameters’ change, in units of the learning rate; weight decay is part of it", states: true, log: true},
    {key: "relative", name: "relative update ‖Δw‖/‖w‖", says: "norm of the parameters’ change over that of the parameters", states: true, log: true},
    {key: "weights", name: "parameter norm ‖w‖", says: "norm of the parameters before the update", states: true, log: true},
    {key: "rootv", name: "√v, root mean square gradient", says: "root of the mean of Adam’s second moment after the update", states: true, log: true},
    {key: "below", name: "elements with √v̂ < ε", says: "share of elements whose second moment is too small to scale the update: Adam’s ε does", states: true, linear: true},
    {key: "tiny", name: "elements with |clipped g| < ε", says: "share of elements whose gradient, as Adam gets it, is smaller than Adam’s ε", states: true, linear: true},
    {key: "cosine", name: "cosine of m and g", says: "whether the gradient points along the momentum that it meets (1) or against it (−1)", states: true, diverging: true},
    {key: "turn", name: "cosine of g and the g before", says: "whether the gradient points as that of the update before (1) or back (−1)", states: true, diverging: true},
    {key: "residual_rms", name: "residual RMS", says: "root mean square of the residual stream after the layer", passes: true, log: true},
    {key: "attention_ratio", name: "attention branch over residual", says: "RMS of what attention adds over that of what it is added to", passes: true, log: true},
    {key: "mlp_ratio", name: "MLP branch over residual", says: "RMS of what the MLP adds over that of what it is added to", passes: true, log: true},
    {key: "attention_logit", name: "largest attention logit", says: "largest magnitude of a scaled product of a query and a key that it sees", passes: true, log: true},
    {key: "attention_peak", name: "largest attention probability", says: "mean over queries and heads of a query’s largest probability", passes: true, linear: true},
    {key: "attention_entropy", name: "attention entropy", says: "nats, mean over queries and heads", passes: true, linear: true},
    {key: "gradient_norm", name: "‖∂L/∂x‖", says: "norm of the gradient of the loss with respect to the layer’s output", passes: true, log: true}
  ];

  class HeatMap {
    constructor() {
      this.maps = data.motion.heat;
      this.at = 0;
      this.diagnostic = kDiagnostics[0];
      this.kind = "";
      this.change = false;
      this.current = null;
      const select = (label, id, options, act) => el("label", {}, label, el("select", {id, on: {change: (e) => { act(e.target.value); this.update(); }}},
          options.map(([value, text]) => el("option", {value}, text))));
      const kinds = [...new Set(data.motion.models.flatMap((m) => m.kind))];
      const any_states = this.maps.some((m) => m.states);
      const any_passes = this.maps.some((m) => m.passes);
      this.diagnostics = kDiagnostics.filter((d) => (!d.states || any_states) && (!d.passes || any_passes));
      const bar = el("div", {class: "bar onscreen"},
        this.maps.length > 1 ? select("run ", "heat-run", this.maps.map((m, i) => [i, runs[m.run].name]), (v) => { this.at = Number(v); }) : null,
        select("show ", "heat-diagnostic", this.diagnostics.map((d) => [d.key, d.name]), (v) => { this.diagnostic = this.diagnostics.find((d) => d.key === v); }),
        select("of ", "heat-kind", [["", "all tensors"], ...kinds.map((k) => [k, k])], (v) => { this.kind = v; }),
        select("as ", "heat-change", [["", "values"], ["change", "change since the first update"]], (v) => { this.change = v !== ""; }));
      this.plot = el("div", {class: "heat", id: "heat", tabindex: 0, role: "application", on: {keydown: (e) => this.key(e)},
        "aria-label": "Heat map of layers by updates. Arrow keys go from cell to cell; the value is read below the map."});
      this.says = el("p", {class: "note", "aria-live": "polite", id: "heat-value"}, "\u00a0");
      this.caption = el("figcaption");
      this.number = numbered("Figure");
      this.table = el("details", {on: {toggle: () => this.fillTable()}}, el("summary", {}, "The map as a table"));
      this.node = el("figure", {}, bar, this.plot, this.says, this.caption, this.table);
      this.update();
    }

    attach() {
      this.draw();
      new ResizeObserver(() => { if (Math.abs(this.plot.clientWidth - this.width) > 1) this.draw(); }).observe(this.plot);
    }

    update() {
      const map = this.map = this.maps[this.at], tensors = data.motion.models[map.model];
      const states = map.states;
      const first = this.diagnostic.states ? (states ? states.first : 0) : map.first;
      const width = this.diagnostic.states ? (states ? states.last - states.first + 1 : 0) : map.lr.length;
      this.updates = d3.range(first, first + width);
      const rows = new Map();  // label -> tensors
      tensors.name.forEach((name, t) => {
        const layer = tensors.layer[t];
        if (this.diagnostic.passes ? layer < 0 : this.kind && tensors.kind[t] !== this.kind) return;
        const label = layer >= 0 ? `layer ${layer}` : {embed_tokens: "embedding", norm: "final norm"}[tensors.kind[t]] || tensors.kind[t];
        if (!rows.has(label)) rows.set(label, {label, layer, tensors: [], order: layer >= 0 ? layer : tensors.kind[t].includes("embed") ? -1 : 1e9});
        rows.get(label).tensors.push(t);
      });
      this.rows = [...rows.values()].sort((a, b) => a.order - b.order);
      for (const row of this.rows) {
        row.values = this.updates.map((k, i) => this.diagnostic.passes ? this.ofPass(map, row.layer, i)
            : this.value(map, tensors, row.tensors, k));
        const base = row.values.find(Number.isFinite);
        row.changes = row.values.map((v) => (this.diagnostic.log ? Math.log2(v / base) : v - base));
      }
      this.current = null;
      this.says.textContent = "\u00a0";
      this.writeCaption();
      if (this.plot.isConnected) this.draw();
      if (this.table.open) this.fillTable();
    }

    ofPass(map, layer, i) { return map.passes ? number(map.passes[this.diagnostic.key][layer][i]) : NaN; }

    value(map, tensors, members, k) {
      const g = (t) => number(map.gradient[t][k - map.first]), s = map.states, at = s ? k - s.first : 0;
      const sum = (f) => d3.sum(members, f), squares = (name) => sum((t) => number(s[name][t][at]) ** 2);
      // d3.sum passes over NaN, which here means: not known.
      const known = (name) => members.every((t) => !Number.isNaN(number(s[name][t][at])));
      const elements = sum((t) => tensors.elements[t]);
      switch (this.diagnostic.key) {
        case "norm": return members.every((t) => Number.isFinite(g(t))) ? Math.sqrt(sum((t) => g(t) ** 2)) : NaN;
        case "share": return sum((t) => g(t) ** 2) / d3.sum(tensors.name, (_, t) => g(t) ** 2);
        case "rms": return Math.sqrt(squares("change") / elements) / number(map.lr[k - map.first]);
        case "relative": return Math.sqrt(squares("change") / squares("parameter"));
        case "weights": return Math.sqrt(squares("parameter"));
        case "rootv": return Math.sqrt(sum((t) => number(s.second[t][at])) / elements);
        case "below": return known("below_eps") ? sum((t) => number(s.below_eps[t][at])) / elements : NaN;
        case "tiny": return known("gradient_below") ? sum((t) => number(s.gradient_below[t][at])) / elements : NaN;
        case "turn": return known("turned") ? sum((t) => number(s.turned[t][at])) / Math.sqrt(squares("before") * sum((t) => g(t) ** 2)) : NaN;
        case "cosine": return known("along") ? sum((t) => number(s.along[t][at])) / Math.sqrt(squares("previous") * sum((t) => g(t) ** 2)) : NaN;
      }
      return NaN;
    }

    // -> {color(value), ticks: [values], text(value), t(value): position on the bar}
    scale() {
      const shown = (row) => (this.change ? row.changes : row.values);
      const finite = this.rows.flatMap(shown).filter((v) => Number.isFinite(v) && (this.change || !this.diagnostic.log || v > 0));
      let [low, high] = finite.length ? d3.extent(finite) : [0, 1];
      if (this.change || this.diagnostic.diverging) {
        const most = Math.max(Math.abs(low), Math.abs(high), 1e-9);
        const t = d3.scaleLinear().domain([-most, most]).clamp(true);
        const text = this.change && this.diagnostic.log ? (v) => `×${short(2 ** v, 2)}` : (v) => short(v, 2);
        return {color: (v) => d3.interpolatePuOr(1 - t(v)), t, text, ticks: [-most, -most / 2, 0, most / 2, most]};
      }
      if (this.diagnostic.linear) [low, high] = [0, Math.max(high, 1e-9)];
      if (low === high) high = this.diagnostic.log ? low * 1.01 : low + 1;
      const t = (this.diagnostic.log ? d3.scaleLog() : d3.scaleLinear()).domain([low, high]).range([0, 1]).clamp(true);
      return {color: (v) => d3.interpolateCividis(t(v)), t, text: (v) => short(v, 3), ticks: d3.range(5).map((i) => t.invert(i / 4))};
    }

    draw() {
      const width = this.width = Math.max(260, this.plot.clientWidth);
      const longest = d3.max(this.rows, (row) => row.label.length) || 8;
      const margin = {top: 34, right: 4, bottom: 34, left: Math.min(150, 14 + longest * 6.3)};
      const cell = {w: (width - margin.left - margin.right) / Math.max(1, this.updates.length), h: this.rows.length > 48 ? 9 : 13};
      const height = margin.top + cell.h * this.rows.length + margin.bottom;
      const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("aria-hidden", "true");
      const scale = this.colors = this.scale();
      this.drawBar(svg, scale, margin, width);
      const root = svg.append("g").attr("transform", `translate(${margin.left},${margin.top})`);
      if (this.updates.length === 0) {
        root.append("text").attr("y", 14).text("This run keeps no states around the rise.");
      }
      const every = Math.ceil(this.rows.length * 12 / (cell.h * this.rows.length));
      this.rows.forEach((row, r) => {
        if (r % every === 0 || !row.label.startsWith("layer")) {
          root.append("text").attr("x", -6).attr("y", (r + .5) * cell.h).attr("dy", "0.34em").attr("text-anchor", "end").text(row.label);
        }
        (this.change ? row.changes : row.values).forEach((v, c) => {
          const usable = Number.isFinite(v) && (this.change || !this.diagnostic.log || v > 0);
          root.append("rect").attr("class", "heatcell").attr("x", c * cell.w).attr("y", r * cell.h).attr("width", Math.max(.5, cell.w - .6))
              .attr("height", cell.h - .6).attr("fill", usable ? scale.color(v) : "var(--missing)").attr("data-r", r).attr("data-c", c);
        });
      });
      const step = Math.ceil(24 / cell.w);
      this.updates.forEach((k, c) => {
        if (k % step === 0) root.append("text").attr("x", (c + .5) * cell.w).attr("y", this.rows.length * cell.h + 13).attr("text-anchor", "middle").text(k);
      });
      root.append("text").attr("class", "strong").attr("x", cell.w * this.updates.length).attr("y", this.rows.length * cell.h + 27).attr("text-anchor", "end").text("update");
      const onset = data.motion.spike && this.map.run === data.motion.run ? this.updates.indexOf(data.motion.spike.onset) : -1;
      if (onset >= 0) {
        root.append("line").attr("class", "spikeline").attr("x1", onset * cell.w - .3).attr("x2", onset * cell.w - .3).attr("y1", -4).attr("y2", this.rows.length * cell.h + 3);
      }
      for (const name of ["pointermove", "pointerdown"]) svg.node().addEventListener(name, (event) => this.point(event.target));
      this.plot.replaceChildren(svg.node());
      this.mark();
    }

    drawBar(svg, scale, margin, width) {
      const w = Math.min(320, width - margin.left - margin.right), x = (i) => margin.left + w * i;
      d3.range(64).forEach((i) => {
        const t = i / 63, [low, high] = scale.t.domain();
        svg.append("rect").attr("x", x(i / 64)).attr("y", 0).attr("width", w / 64 + .5).attr("height", 9).attr("fill", scale.color(scale.t.invert ? scale.t.invert(t) : low + t * (high - low)));
      });
      scale.ticks.forEach((v, i) => svg.append("text").attr("x", x(i / (scale.ticks.length - 1))).attr("y", 22)
          .attr("text-anchor", i === 0 ? "start" : i === scale.ticks.length - 1 ? "end" : "middle").text(scale.text(v)));
    }

    point(target) {
      if (!target || !target.classList.contains("heatcell")) return;
      this.current = [Number(target.dataset.r), Number(target.dataset.c)];
      this.mark();
    }

    key(event) {
      const move = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
      if (!move || this.updates.length === 0) return;
      event.preventDefault();
      const [r, c] = this.current || [0, 0], inside = (i, n) => Math.max(0, Math.min(n - 1, i));
      this.current = this.current ? [inside(r + move[0], this.rows.length), inside(c + move[1], this.updates.length)] : [0, 0];
      this.mark();
    }

    mark() {
      for (const old of this.plot.querySelectorAll(".current")) old.classList.remove("current");
      if (!this.current) return;
      const [r, c] = this.current, cell = this.plot.querySelector(`[data-r="${r}"][data-c="${c}"]`);
      if (!cell) return;
      cell.classList.add("current");
      cell.parentNode.append(cell);
      const v = this.rows[r].values[c];
      this.says.textContent = `${this.rows[r].label}${this.kind && !this.diagnostic.passes ? ", " + this.kind : ""}, update ${this.updates[c]}: ${this.diagnostic.name} ` +
          `${Number.isNaN(v) ? "not kept" : short(v)}` + (this.diagnostic.log && Number.isFinite(this.rows[r].changes[c]) ? `, ×${short(2 ** this.rows[r].changes[c], 3)} of update ${this.updates[0]}` : "");
    }

    writeCaption() {
      const d = this.diagnostic, left = data.motion.heat_left_out;
      this.caption.replaceChildren(el("b", {}, this.number), `${d.name[0].toUpperCase()}${d.name.slice(1)}${d.passes ? "" : " of " + (this.kind || "all tensors")} by layer and update, run ${runs[this.map.run].name}: ${d.says}. ` +
        (this.change ? "Colours are the change since the first update shown. " : d.diverging ? "" : d.linear ? "" : "The colour scale is logarithmic. ") +
        (data.motion.spike ? "The dashed line is where the examined loss begins to rise. " : "") + "Grey: not kept. Five digits are kept of each number." +
        (left ? ` ${plural(left, "more run")} without heat maps.` : ""));
    }

    fillTable() {
      if (!this.table.open) return;
      const old = this.table.querySelector(".scroll");
      if (old) old.remove();
      this.table.append(el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Table"}, el("table", {},
        el("thead", {}, el("tr", {}, el("th", {scope: "col", class: "text"}, "row"), this.updates.map((k) => el("th", {scope: "col"}, String(k))))),
        el("tbody", {}, this.rows.map((row) => el("tr", {}, el("th", {scope: "row"}, row.label), row.values.map((v) => el("td", {}, Number.isNaN(v) ? "–" : short(v)))))))));
    }
  }

  function heat() {
    if (!data.motion || data.motion.heat.length === 0) return;
    const map = new HeatMap();
    section("layers", "Layers by updates", map.node);
    map.attach();
  }

  // ---- Lineage, recipes, environment ------------------------------------------------------------

  function lineage() {
    if (runs.length === 0) return;
    const rows = items.filter((item) => item.runs.length > 0);
    const rowOf = (run) => rows.findIndex((item) => item.runs.includes(run));
    const parentRow = (item) => {
      const from = runs[item.runs[0]].lineage;
      return from && from.run !== null ? rowOf(from.run) : -1;
    };
    // A branch stands below its parent.
    const order = [], visit = (r) => {
      if (order.includes(r)) return;
      order.push(r);
      rows.forEach((item, i) => { if (i !== r && parentRow(item) === r) visit(i); });
    };
    rows.forEach((item, r) => { if (parentRow(item) < 0 || parentRow(item) === r) visit(r); });
    rows.forEach((_, r) => visit(r));
    const first = d3.min(runs, (run) => run.first_position), last = Math.max(first + 1, d3.max(runs, (run) => run.last_position));
    const x = (k) => `${(2 + 96 * (k - first) / (last - first)).toFixed(2)}%`;
    const grid = el("div", {class: "lineage", role: "list"});
    order.forEach((r, at) => {
      const item = rows[r], run = runs[item.runs[0]], parent = parentRow(item);
      const svg = d3.create("svg").attr("aria-hidden", "true");
      order.forEach((other, below) => {  // lines down from parents to branches
        const p = parentRow(rows[other]);
        if (p < 0 || p === other) return;
        const top = order.indexOf(p), position = runs[rows[other].runs[0]].lineage.position;
        const from = at === top ? "50%" : at > top && at <= below ? "0%" : null;
        if (from === null) return;
        svg.append("line").attr("stroke", "var(--soft)").attr("stroke-width", 1.4).attr("x1", x(position)).attr("x2", x(position))
            .attr("y1", from).attr("y2", at === below ? "50%" : "100%");
      });
      svg.append("line").attr("stroke", item.color).attr("stroke-width", item.main ? 6 : 5).attr("stroke-linecap", "round")
          .attr("x1", x(run.first_position)).attr("x2", x(d3.max(item.runs, (i) => runs[i].last_position))).attr("y1", "50%").attr("y2", "50%");
      const where = run.lineage ? `branch of ${lineageText(run)}` + (run.lineage.run === null ? ", which is not in this report" : "") : "recorded from its initial state";
      const changes = item.kind === "group" ? [item.name.replace(/ \(.*$/, ""), item.noise] : changesOf(run);
      grid.append(el("div", {class: "who", role: "listitem"}, el("b", {}, item.kind === "group" ? list([runs[item.runs[0]].name, "…", runs[item.runs[item.runs.length - 1]].name]).replace(" and ", " ") + ` (${item.runs.length})` : item.name),
                     el("span", {class: "sub"}, `${where}, to ${run.last_position}`), changes.map((text) => el("code", {class: "sub"}, text))), el("div", {class: "bars"}, svg.node()));
      if (parent < 0 && run.lineage) svg.append("circle").attr("cx", x(run.first_position)).attr("cy", "50%").attr("r", 4).attr("fill", "var(--page)").attr("stroke", item.color).attr("stroke-width", 2);
    });
    const axis = d3.create("svg").attr("aria-hidden", "true");
    for (const k of d3.scaleLinear().domain([first, last]).ticks(6).filter(Number.isInteger)) {
      axis.append("line").attr("class", "gridline").attr("x1", x(k)).attr("x2", x(k)).attr("y2", 6);
      axis.append("text").attr("x", x(k)).attr("y", 18).attr("text-anchor", "middle").text(k);
    }
    grid.append(el("div", {class: "who"}), el("div", {class: "bars axis"}, axis.node()));
    section("lineage", "Lineage", el("figure", {}, grid, figcaption(
      `Where runs come from, on the axis of positions ${first} to ${last}. RUN@k is the state after k updates; a branch begins at such a state of its parent. Under each name stands what was changed, in canonical form, with the updates for which it was in force.`)));
  }

  // Runs that share something, as one text.
  function sharing(keys) {
    const groups = new Map();
    keys.forEach((key, i) => groups.set(key, [...(groups.get(key) || []), i]));
    return [...groups.values()];
  }
  function namesOf(indices) {
    if (indices.length === runs.length && runs.length > 1) return "all runs";
    const names = indices.map((i) => runs[i].name);
    return names.length > 6 ? `${names.slice(0, 5).join(", ")} and ${names.length - 5} more` : list(names);
  }

  function recipes() {
    if (runs.length === 0) return;
    const same = data.recipes.length === 0;
    const columns = sharing(runs.map((_, i) => JSON.stringify(data.recipes.map((r) => r.values[i]))));
    section("recipes", "Recipes", el("p", {}, same
        ? (runs.length === 1 ? `The recipe is ${runs[0].recipe}, digest ` : "All runs have the same recipe, digest ")
        : "The recipes differ in these keys; all others are the same. ", same ? el("code", {}, runs[0].recipe_digest) : "", same ? ". " : "",
        "What a branch changes for some updates stands in its lineage, not in its recipe."),
      same ? "" : table("Keys that are not the same in all runs.", [{title: "key", text: true}, ...columns.map((c) => ({title: namesOf(c), text: true, cls: "wrap"}))],
        data.recipes.map((r) => [el("code", {}, r.key), ...columns.map((c) => el("code", {}, r.values[c[0]]))]), "recipe-table"));
  }

  const kLevels = {
    portable: "bits are a function of recipe, dataset and numerics id alone: the same on every processor, with any number of threads and ranks",
    native: "bits hold for the same libraries on the same kind of device"
  };
  function environment() {
    if (runs.length === 0) return;
    const groups = sharing(runs.map((run) => JSON.stringify(run.environment) + run.parameters));
    const rows = groups.map((members) => {
      const run = runs[members[0]], e = run.environment;
      return [namesOf(members), e.level || "–", el("code", {}, e.numerics), [e.device, e.isa, e.libraries].filter(Boolean).join(", ") || "–",
              `${e.version}, format ${e.format}`, e.hosts.join(", ") || "–", String(e.attempts), `${e.virtual_shards} × ${e.lanes}`,
              `${d3.format(",")(run.parameters)} in ${plural(run.tensors, "tensor")}, ${plural(run.layers, "layer")}`];
    });
    const levels = [...new Set(runs.flatMap((run) => run.environment.level.split(", ")).filter(Boolean))];
    section("environment", "Environment and guarantee",
      el("p", {}, levels.map((level) => `${level}: ${kLevels[level] || "see the documentation"}. `).join("")),
      table("Where the runs were made, and what their bits depend on. Shards × lanes are virtual: they fix the order of sums, not the number of processes.",
        [{title: "runs", text: true, cls: "wrap"}, {title: "level", text: true}, {title: "numerics", text: true}, {title: "made on", text: true, cls: "wrap"}, {title: "retrace", text: true},
         {title: "host", text: true}, {title: "attempts"}, {title: "shards × lanes"}, {title: "model", text: true, cls: "wrap"}], rows, "environment-table"));
  }

  // ---- All numbers ------------------------------------------------------------------------------

  function numbers() {
    if (runs.length === 0) return;
    const host = el("div");
    const show = (index) => {
      const run = runs[index], at = (name, i) => (run.curves[name] ? String(run.curves[name][i]) : "–");
      host.replaceChildren(el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Table"}, el("table", {id: "numbers-table"},
        el("thead", {}, el("tr", {}, ["update", "evaluation loss", "training loss", "gradient norm", "clip factor", "learning rate", "action"].map((t) => el("th", {scope: "col"}, t)))),
        el("tbody", {}, d3.range(run.length).map((i) => el("tr", {}, el("th", {scope: "row"}, String(run.first + i)),
          ["evaluation_loss", "loss", "gradient_norm", "clip", "lr"].map((name) => el("td", {}, at(name, i))), el("td", {}, run.actions[run.first + i] || "applied")))))));
    };
    const choice = el("select", {id: "numbers-run", on: {change: (e) => show(Number(e.target.value))}}, runs.map((run, i) => el("option", {value: i}, run.name)));
    const save = el("button", {type: "button", on: {click: () => {
      const url = URL.createObjectURL(new Blob([document.getElementById("data").textContent], {type: "application/json"}));
      el("a", {href: url, download: "report.json"}).click();
      setTimeout(() => URL.revokeObjectURL(url), 1000);
    }}}, "Save as JSON");
    section("numbers", "All numbers", el("p", {}, "The records of the ledgers, to the last digit. The page carries them all; ", el("code", {}, "retrace log --csv"), " prints the same."),
      el("div", {class: "bar onscreen"}, save),
      el("details", {on: {toggle: (e) => { if (e.target.open && !host.firstChild) show(0); }}}, el("summary", {}, "Records of a run, update by update"),
        el("div", {class: "bar"}, el("label", {}, "run ", choice)), host));
  }

  // ---- The page ---------------------------------------------------------------------------------

  function summary() {
    const text = [];
    const branches = runs.filter((run) => run.lineage).length;
    if (runs.length) {
      text.push(`${plural(runs.length, "run")}${branches ? `, ${branches === runs.length ? "all" : branches} of them ${branches === 1 ? "a branch" : "branches"}` : ""}.`);
    }
    const motion = data.motion;
    if (motion && motion.spike && motion.spike.is_spike) {
      const s = motion.spike;
      text.push(`The ${motion.evaluation ? "evaluation" : "training"} loss of ${runs[motion.run].name} spikes: at update ${s.peak} it is ${fixed(s.rise, 2)} nats above the ${fixed(s.low_loss, 2)} of update ${s.low}.`);
    } else if (runs.length) {
      text.push(`No run has a spike: no loss rises by ${data.spike_nats} nats above the least value before it.`);
    }
    const broken = runs.filter((run) => run.curves.loss.some((v) => !Number.isFinite(v)));
    if (broken.length) text.push(`The loss of ${list(broken.map((run) => run.name))} is not finite in places (✕).`);
    if (experiment && experiment.control_equal) {
      const arms = (verdict) => experiment.arms.filter((arm) => arm.verdict === verdict).map((arm) => arm.name);
      const kBy = {removes: "removed by", shrinks: "made smaller by", delays: "delayed by", worsens: "made worse by"};
      const effects = Object.keys(kBy).filter((v) => arms(v).length).map((v) => `${kBy[v]} ${list(arms(v))}`);
      const noise = arms("within noise");
      if (effects.length) text.push(`In the experiment the spike is ${effects.join("; ")}.`);
      if (noise.length) text.push(`${effects.length ? "Within" : "In the experiment, within"} noise: ${list(noise)}.`);
    }
    document.getElementById("summary").textContent = text.join(" ");
  }

  summary();
  curves();
  if (runs.length) document.getElementById("curves").append(runTable());
  verdicts();
  movers();
  heat();
  lineage();
  recipes();
  environment();
  numbers();
  document.getElementById("footer").append(
      `Made by retrace ${data.version}, with D3 ${d3.version} (Mike Bostock, BSD 3-clause license, within this file).`);
  document.documentElement.dataset.drawn = (performance.now() - started).toFixed(0);
})();
