/* Line charts from data: round axes, curves with their averages, level lines, and values under the pointer.

   layout() and the formats are pure; draw() puts their result into a figure's <svg>. Text reaches the page only through
   textContent: names of runs and metrics are data. */
"use strict";

const Charts = (() => {
  const LEFT = 56, RIGHT = 14, TOP = 12, BOTTOM = 30;
  const MOST_MARKERS = 60;

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

  function formatTick(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e5 || size < 1e-3) return exponential(value, 1);
    return value.toLocaleString("en", {maximumFractionDigits: 4});
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
    if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
    if (log) {
      const pad = high > low ? (high / low) ** 0.06 : 2;
      return [low / pad, high * pad];
    }
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [zero && low === 0 ? low : low - pad, high + pad];
  }

  /* Where everything of a chart lies, in the units of its drawing. */
  function layout(chart) {
    const points = chart.series.flatMap(s => s.points);
    const xs = points.map(p => p[0]);
    const [low, high] = valueRange(points.map(p => p[1]), chart.log, chart.zero);
    const first = xs.reduce((a, b) => Math.min(a, b)), last = xs.reduce((a, b) => Math.max(a, b));
    const left = LEFT, right = chart.width - RIGHT, base = chart.height - BOTTOM;
    const x = scale(first, last, left, right), y = scale(low, high, base, TOP, chart.log);
    const place = list => list.map(([a, b]) => [x(a), y(b)]);
    const curves = [];
    for (const s of chart.series) {
      const kind = `c${s.colour}${s.dashed ? " dashed" : ""}`;
      if (s.average) {
        curves.push({kind: `faint ${kind}`, points: place(s.points)}, {kind, points: place(s.average)});
        continue;
      }
      const dots = (s.markers && s.points.length <= MOST_MARKERS) || s.points.length === 1;
      curves.push({kind, points: place(s.points), dots});
    }
    const wholeSteps = x.ticks(Math.max(4, Math.round((right - left) / 100))).filter(Number.isInteger);
    return {
      left, right, base, top: TOP, first, last, x, curves,
      rows: y.ticks(5).map(v => ({y: y(v), label: formatTick(v)})),
      columns: wholeSteps.map(v => ({x: x(v), label: v.toLocaleString("en")})),
    };
  }

  function draw(figure) {
    const chart = JSON.parse(figure.querySelector("script").textContent);
    const svg = figure.querySelector("svg");
    const found = layout(chart);
    const add = (parent, tag, attributes, text) => {
      const element = document.createElementNS(svg.namespaceURI, tag);
      for (const [name, value] of Object.entries(attributes)) {
        element.setAttribute(name, typeof value === "number" ? value.toFixed(1) : value);
      }
      if (text !== undefined) element.textContent = text;
      return parent.appendChild(element);
    };
    const {left, right, base} = found;
    for (const {y, label} of found.rows) {
      add(svg, "line", {class: "grid", x1: left, x2: right, y1: y, y2: y});
      add(svg, "text", {class: "tick", x: left - 8, y: y + 3.5, "text-anchor": "end"}, label);
    }
    add(svg, "line", {class: "axis", x1: left, x2: right, y1: base, y2: base});
    for (const {x, label} of found.columns) {
      add(svg, "text", {class: "tick", x, y: base + 17, "text-anchor": "middle"}, label);
    }
    for (const curve of found.curves) {
      const joined = curve.points.map(p => p.map(v => v.toFixed(1)).join(",")).join(" ");
      add(svg, "polyline", {class: `line ${curve.kind}`, points: joined});
      if (!curve.dots) continue;
      const group = add(svg, "g", {class: `dots ${curve.kind}`});
      for (const [cx, cy] of curve.points) add(group, "circle", {cx, cy, r: 3});
    }
    const cross = add(svg, "line", {class: "cross", x1: 0, x2: 0, y1: found.top, y2: base});
    point(figure, svg, chart, found, cross);
  }

  /* The nearest value of every curve, and its step, beside the pointer. */
  function point(figure, svg, chart, found, cross) {
    const tip = figure.querySelector(".tip");
    svg.addEventListener("pointerleave", () => {
      tip.hidden = true;
      cross.style.visibility = "hidden";
    });
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * chart.width;
      const want = found.first + ((at - found.left) / (found.right - found.left)) * (found.last - found.first);
      const nearer = (a, b) => (Math.abs(b[0] - want) < Math.abs(a[0] - want) ? b : a);
      const values = chart.series.map(s => [s, s.points.reduce(nearer)]);
      const curves = values.filter(([s]) => !s.dashed).map(([, p]) => p);
      const step = curves.length ? curves.reduce(nearer)[0] : Math.round(want);
      const head = document.createElement("b");
      head.textContent = `step ${step.toLocaleString("en")}`;
      tip.replaceChildren(head, ...values.map(([s, p]) => row(s, p, step)));
      const place = found.x(step);
      cross.setAttribute("x1", place);
      cross.setAttribute("x2", place);
      cross.style.visibility = "visible";
      tip.hidden = false;
      let left = (place / chart.width) * box.width + 12;
      if (left + tip.offsetWidth > box.width) left -= tip.offsetWidth + 24;
      tip.style.left = `${Math.max(left, 0)}px`;
    });
  }

  function row(series, [x, y], step) {
    const line = document.createElement("div"), text = document.createElement("span");
    line.className = `c${series.colour}`;
    const other = x === step || series.dashed ? "" : `  (step ${x.toLocaleString("en")})`;
    text.textContent = `${series.name}  ${formatNumber(y)}${other}`;
    line.append(document.createElement("i"), text);
    return line;
  }

  return {draw, layout, niceTicks, formatNumber, formatTick};
})();
