/* Charts from data: round axes, curves with their averages, stacked parts, level lines, and values under the pointer.

   layout() and the formats are pure; Chart puts their result into a figure's <svg>, drawn as wide as its place is. What a
   reader chooses for all charts (the x axis, how much is averaged) lies in Charts.view, what for one (a logarithmic axis,
   which curves) in the Chart. Text reaches the page only through textContent: names of runs and metrics are data. */
"use strict";

const Charts = (() => {
  const LEFT = 56, RIGHT = 14, TOP = 12, BOTTOM = 30;
  const MOST_MARKERS = 60;
  const FEWEST_TO_AVERAGE = 21;
  const view = {x: "steps", smooth: 0.025, axes: []};

  /* About `count` round numbers (1, 2, 5 times a power of ten) within low to high. */
  function niceTicks(low, high, count = 5) {
    const span = high - low;
    if (!(span > 0) || !Number.isFinite(span)) return [low];
    const raw = span / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const distance = step => Math.abs(Math.log(step / raw));
    const step = [1, 2, 5, 10].map(m => m * power).reduce((a, b) => (distance(b) < distance(a) ? b : a));
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) ticks.push(i * step + 0); // no -0
    return ticks;
  }

  function logTicks(low, high) {
    const factors = high - low > 2 ? [1] : [1, 2, 5];
    const ticks = [];
    for (let p = Math.floor(low); p <= Math.ceil(high); p++) {
      for (const f of factors) {
        const at = Math.log10(f) + p;
        if (low - 1e-9 <= at && at <= high + 1e-9) ticks.push(f * 10 ** p);
      }
    }
    return ticks;
  }

  function exponential(value, digits) {
    const [mantissa, power] = value.toExponential(digits).split("e");
    return `${mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa}e${Number(power)}`;
  }

  /* A value for people: four digits, thousands parted, powers of ten where it is tiny or huge. */
  function formatNumber(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e7 || size < 1e-3) return exponential(value, 2);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return value.toFixed(Math.max(0, 3 - Math.floor(Math.log10(size))));
  }

  /* The label of a tick; `step` to its neighbour: as many digits as tell the two apart. */
  function formatTick(value, step = value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    const fine = Math.floor(Math.log10(Math.abs(step)) + 1e-9);
    if (size >= 1e5 || size < 1e-3) return exponential(value, Math.max(1, Math.floor(Math.log10(size) + 1e-9) - fine));
    return value.toLocaleString("en", {maximumFractionDigits: Math.max(4, -fine)});
  }

  /* What the x axis counts in: [size of a unit, its sign]. */
  function unitOf(x, span) {
    const units = {
      seconds: [[86400 * 3, 86400, " d"], [3600 * 3, 3600, " h"], [180, 60, " min"], [0, 1, " s"]],
      tokens: [[1e9, 1e9, "B"], [1e6, 1e6, "M"], [1e4, 1e3, "k"], [0, 1, ""]],
    }[x] ?? [[0, 1, ""]];
    return units.find(([from]) => span >= from).slice(1);
  }

  function formatPlace(x, value) {
    const [size, sign] = unitOf(x, Math.abs(value));
    const shown = value / size;
    const digits = size === 1 ? 0 : shown < 10 ? 2 : 1;
    const text = shown.toLocaleString("en", {maximumFractionDigits: x === "steps" ? 3 : digits});
    return x === "steps" ? `step ${text}` : x === "tokens" ? `${text}${sign} tokens` : `${text}${sign}`;
  }

  /* Values to pixels, linear or logarithmic. */
  function scale(low, high, start, end, log = false) {
    const of = log ? Math.log10 : v => v;
    const first = of(low), last = of(high);
    const place = v => start + (end - start) * (last > first ? (of(v) - first) / (last - first) : 0.5);
    place.ticks = count => (log ? logTicks(first, last) : niceTicks(low, high, count));
    return place;
  }

  function valueRange(values, log, zero) {
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    if (log) {
      const pad = high > low ? (high / low) ** 0.06 : 2;
      return [low / pad, high * pad];
    }
    if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [zero && low === 0 ? low : low - pad, high + pad];
  }

  /* Mean of each point and its neighbours, up to this share of all points on either side, so that it does not lag; near
     the start it looks no further ahead than back, which keeps a steep descent. `log`: the geometric mean. */
  function movingAverage(points, share, log = false) {
    const n = points.length, reach = Math.round(n * share);
    const sums = [0];
    for (const [, y] of points) sums.push(sums[sums.length - 1] + (log ? Math.log(y) : y));
    return points.map(([x], i) => {
      const back = Math.min(reach, i), ahead = Math.min(back, n - 1 - i);
      const mean = (sums[i + ahead + 1] - sums[i - back]) / (back + ahead + 1);
      return [x, log ? Math.exp(mean) : mean];
    });
  }

  /* A step on the chosen axis, between the two known places around it. */
  function placeOf(step, axis, x) {
    const known = axis?.[x];
    if (x === "steps" || !known) return step;
    const steps = axis.steps;
    let low = 0, high = steps.length - 1;
    if (step <= steps[0]) return known[0];
    if (step >= steps[high]) return known[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle;
      else high = middle;
    }
    return known[low] + ((known[high] - known[low]) * (step - steps[low])) / (steps[high] - steps[low]);
  }

  /* The curves of a chart as [place, value]: raw points, and their average where there is one. */
  function curvesOf(chart, {x, smooth, axes, log, hidden}) {
    const on = (points, s) => points
      .filter(p => !log || p[1] > 0)
      .map(([step, y]) => [placeOf(step, axes[s.run ?? 0], x), y, step]);
    const found = chart.series.map((s, index) => {
      const points = on(s.points, s);
      const averaged = s.smooth && smooth > 0 && s.points.length >= FEWEST_TO_AVERAGE;
      const average = averaged ? movingAverage(on(s.means ?? s.points, s), smooth, log) : null;
      return {index, series: s, points, average};
    });
    return found.filter(c => c.points.length && !hidden?.has(c.index));
  }

  /* Parts of a whole one upon another: every curve gets the one below it as its base. */
  function stacked(curves, smooth) {
    let below = null;
    return curves.map(curve => {
      const values = smooth > 0 ? movingAverage(curve.points, smooth) : curve.points;
      const top = values.map(([x, y], i) => [x, y + (below ? below[i][1] : 0)]);
      const base = below ?? values.map(([x]) => [x, 0]);
      below = top;
      return {...curve, top, base};
    });
  }

  /* Where everything of a chart lies, in the units of its drawing. `chosen`: width, x axis, averaging, log, hidden. */
  function layout(chart, chosen = {}) {
    const settings = {...view, log: chart.log, ...chosen};
    const width = settings.width ?? chart.width, height = settings.height ?? chart.height;
    let found = curvesOf(chart, settings);
    const left = LEFT, right = width - RIGHT, base = height - BOTTOM;
    const empty = {width, height, left, right, base, top: TOP, curves: [], rows: [], columns: [], found: []};
    if (!found.length) return empty;
    if (chart.stack) found = stacked(found, settings.smooth);
    const moving = found.filter(c => !c.series.dashed);
    const xs = (moving.length ? moving : found).flatMap(c => c.points.map(p => p[0]));
    const bare = c => (c.series.bare && c.average ? c.average : c.points);
    const heights = chart.stack ? found.at(-1).top.map(p => p[1]) : found.flatMap(c => bare(c).map(p => p[1]));
    const [low, high] = valueRange(heights, settings.log, chart.zero);
    const first = xs.reduce((a, b) => Math.min(a, b)), last = xs.reduce((a, b) => Math.max(a, b));
    const x = scale(first, last, left, right), y = scale(low, high, base, TOP, settings.log);
    const place = list => list.map(([a, b]) => [x(a), y(b)]);
    const curves = [];
    for (const {series: s, points, average, top, base: under} of found) {
      const kind = `c${s.colour}${s.dashed ? " dashed" : ""}`;
      if (chart.stack) {
        curves.push({kind: `area ${kind}`, points: [...place(top), ...place(under).reverse()], area: true});
      } else if (s.dashed) {
        const level = y(points[points.length - 1][1]);
        curves.push({kind, points: [[left, level], [right, level]]});
      } else if (average) {
        if (!s.bare) curves.push({kind: `faint ${kind}`, points: place(points)});
        curves.push({kind, points: place(average)});
      } else {
        const dots = (s.markers && points.length <= MOST_MARKERS) || points.length === 1;
        curves.push({kind, points: place(points), dots});
      }
    }
    const [size, sign] = unitOf(settings.x, last - first);
    const most = Math.max(2, Math.min(8, Math.round((right - left) / 90)));
    const columns = niceTicks(first / size, last / size, most)
      .filter(v => settings.x !== "steps" || Number.isInteger(v))
      .map(v => ({x: x(v * size), label: `${formatTick(v)}${v || settings.x === "steps" ? sign : ""}`}));
    const ticks = y.ticks(5), step = settings.log || ticks.length < 2 ? undefined : ticks[1] - ticks[0];
    const rows = ticks.map(v => ({y: y(v), label: formatTick(v, step)}));
    return {...empty, first, last, x, curves, rows, columns, found};
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.svg = figure.querySelector("svg");
      this.tip = figure.querySelector(".tip");
      this.hidden = new Set();
      this.log = null;
      this.at = null;
      this.keys = figure.querySelector(".keys");
      this.scale = figure.querySelector("button.scale");
      this.read();
      this.keys?.addEventListener("click", event => this.toggle(event.target.closest("button")));
      this.scale?.addEventListener("click", () => {
        this.log = !(this.log ?? this.data.log);
        this.draw();
      });
      this.svg.addEventListener("pointermove", event => {
        const box = this.svg.getBoundingClientRect();
        this.point(event.clientX - box.left);
      });
      this.svg.addEventListener("pointerleave", () => this.leave());
      this.svg.addEventListener("blur", () => this.leave());
      this.svg.addEventListener("keydown", event => this.key(event));
    }

    /* Take over the data that stand in the figure now. */
    read() {
      this.data = JSON.parse(this.figure.querySelector("script").textContent);
    }

    toggle(button) {
      if (!button) return;
      const index = [...this.keys.children].indexOf(button);
      if (!this.hidden.delete(index)) this.hidden.add(index);
      button.setAttribute("aria-pressed", String(!this.hidden.has(index)));
      this.draw();
    }

    /* Draw where the width is no longer what it was. */
    fit() {
      if (this.svg.parentElement.clientWidth !== this.found?.width) this.draw();
    }

    draw() {
      const {svg, data} = this;
      const width = svg.parentElement.clientWidth;
      if (!width || svg.closest("details:not([open])")) return; // drawn when it is unfolded
      const log = this.log ?? data.log;
      const height = Math.min(data.height, Math.max(190, Math.round(width * 0.62)));
      this.found = layout(data, {...view, width, height, log, hidden: this.hidden});
      this.scale?.setAttribute("aria-pressed", String(log));
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.replaceChildren();
      const {left, right, base, top} = this.found;
      for (const {y, label} of this.found.rows) {
        this.add(svg, "line", {class: "grid", x1: left, x2: right, y1: y, y2: y});
        this.add(svg, "text", {class: "tick", x: left - 8, y: y + 3.5, "text-anchor": "end"}, label);
      }
      this.add(svg, "line", {class: "axis", x1: left, x2: right, y1: base, y2: base});
      for (const {x, label} of this.found.columns) {
        const anchor = x > right - 16 ? "end" : "middle";
        this.add(svg, "text", {class: "tick", x: Math.min(x, right + RIGHT), y: base + 17, "text-anchor": anchor}, label);
      }
      for (const curve of this.found.curves) {
        const joined = curve.points.map(p => p.map(v => v.toFixed(1)).join(",")).join(" ");
        this.add(svg, curve.area ? "polygon" : "polyline", {class: `line ${curve.kind}`, points: joined});
        if (!curve.dots) continue;
        const group = this.add(svg, "g", {class: `dots ${curve.kind}`});
        for (const [cx, cy] of curve.points) this.add(group, "circle", {cx, cy, r: 3});
      }
      this.cross = this.add(svg, "line", {class: "cross", x1: 0, x2: 0, y1: top, y2: base});
      if (this.at !== null) this.show(this.at);
    }

    add(parent, tag, attributes, text) {
      const element = document.createElementNS(this.svg.namespaceURI, tag);
      for (const [name, value] of Object.entries(attributes)) {
        element.setAttribute(name, typeof value === "number" ? value.toFixed(1) : value);
      }
      if (text !== undefined) element.textContent = text;
      return parent.appendChild(element);
    }

    /* Places of all points of the curves, ascending. */
    places() {
      const curves = this.found.found.filter(c => !c.series.dashed);
      return [...new Set(curves.flatMap(c => c.points.map(p => p[0])))].sort((a, b) => a - b);
    }

    point(pixel) {
      if (!this.found?.found.length) return;
      const {first, last, left, right} = this.found;
      this.show(Math.min(last, Math.max(first, first + ((pixel - left) / (right - left)) * (last - first))));
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || !this.found?.found.length) return;
      if (event.key === "Escape") return this.leave();
      if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
      event.preventDefault();
      const places = this.places();
      if (!places.length) return;
      const jump = event.shiftKey ? Math.max(1, Math.round(places.length / 10)) : 1;
      let next = this.at === null ? -1 : places.findIndex(p => p >= this.at - 1e-9);
      if (event.key === "Home") next = 0;
      else if (event.key === "End") next = places.length - 1;
      else if (this.at === null) next = event.key === "ArrowRight" ? 0 : places.length - 1;
      else next += event.key === "ArrowRight" ? jump : -jump;
      this.show(places[Math.min(places.length - 1, Math.max(0, next))]);
    }

    leave() {
      this.at = null;
      this.tip.hidden = true;
      if (this.cross) this.cross.style.visibility = "hidden";
    }

    /* The nearest value of every curve, and where it lies, beside `want`. */
    show(want) {
      const nearer = (a, b) => (Math.abs(b[0] - want) < Math.abs(a[0] - want) ? b : a);
      const {found, x, width} = this.found;
      const bare = c => (c.series.bare && c.average ? c.average : c.points);
      const values = found.map(c => [c.series, bare(c).reduce(nearer)]);
      const curves = values.filter(([s]) => !s.dashed).map(([, p]) => p);
      const at = curves.length ? curves.reduce(nearer)[0] : want;
      this.at = at;
      const head = document.createElement("b");
      head.textContent = formatPlace(view.x, at);
      const rows = values.map(([s, p]) => this.row(s, p, at));
      this.tip.replaceChildren(head, ...(this.data.stack ? rows.reverse() : rows));
      const place = x(at);
      this.cross.setAttribute("x1", place);
      this.cross.setAttribute("x2", place);
      this.cross.style.visibility = "visible";
      this.tip.hidden = false;
      let left = place + 12;
      if (left + this.tip.offsetWidth > width) left = place - this.tip.offsetWidth - 12;
      this.tip.style.left = `${Math.max(left, 0)}px`;
    }

    row(series, [place, y], at) {
      const line = document.createElement("div"), text = document.createElement("span");
      line.className = `c${series.colour}`;
      const far = Math.abs(place - at) > 0.002 * (this.found.last - this.found.first);
      text.textContent = `${series.name}  ${formatNumber(y)}${far && !series.dashed ? `  (${formatPlace(view.x, place)})` : ""}`;
      line.append(document.createElement("i"), text);
      return line;
    }
  }

  const known = new Map();

  /* Draw the figures of the page, and again whenever their width changes. */
  function start(root = document) {
    readAxes(root);
    for (const figure of known.keys()) if (!figure.isConnected) known.delete(figure);
    // a frame later: drawing changes a height, which must not be news within the same round
    const sizes = new ResizeObserver(entries => requestAnimationFrame(() => {
      for (const entry of entries) known.get(entry.target.closest("figure"))?.fit();
    }));
    for (const figure of root.querySelectorAll("figure.chart")) {
      const chart = new Chart(figure);
      known.set(figure, chart);
      chart.draw();
      sizes.observe(figure.querySelector(".plot"));
    }
    for (const details of root.querySelectorAll("details")) {
      details.addEventListener("toggle", () => {
        for (const figure of details.querySelectorAll("figure.chart")) known.get(figure)?.fit();
      });
    }
    for (const group of root.querySelectorAll("[data-choose]")) {
      group.addEventListener("click", event => choose(group, event.target.closest("button")));
    }
  }

  function readAxes(root) {
    const axes = root.querySelector("script.axes");
    if (axes) view.axes = JSON.parse(axes.textContent);
  }

  function choose(group, button) {
    if (!button) return;
    for (const other of group.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
    view[group.dataset.choose] = group.dataset.choose === "smooth" ? Number(button.value) : button.value;
    for (const chart of known.values()) {
      chart.leave();
      chart.draw();
    }
  }

  return {start, readAxes, known, layout, view, niceTicks, formatNumber, formatTick, formatPlace, movingAverage, placeOf};
})();
