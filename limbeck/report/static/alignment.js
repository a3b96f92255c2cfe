/* The viewer of alignments: rows of chunks, student above teacher. Shows what a chunk holds under the pointer or the
   keyboard's focus, keeps to chosen kinds, and orders rows and chunks by how far the two models are apart. Tokens are
   data and reach the page through textContent alone. */
"use strict";

(() => {
  const KINDS = ["1:1", "1:n", "n:1", "n:m", "not exact"];
  const MARKS = {"1:1": "k-11", "1:n": "k-1n", "n:1": "k-n1", "n:m": "k-nm", "not exact": "inexact"};
  const HEAT = [0.05, 0.2, 0.6, 1.5];
  const MOST_LISTED = 100;

  const kindOf = chunk => (chunk.exact ? chunk.kind : "not exact");
  const heatOf = value => HEAT.filter(limit => value >= limit).length;
  const number = (value, digits = 2) => value.toFixed(digits).replace("-", "−");
  const share = value => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}%`;
  const count = value => value.toLocaleString("en");
  const mean = values => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0);
  const tokens = list => list.map(token => make("i", {text: token}));

  function start(viewer) {
    const data = JSON.parse(viewer.querySelector("script").textContent);
    const tip = viewer.querySelector(".tip"), list = viewer.querySelector(".rows");
    const hidden = new Set();
    const rows = data.rows.map((row, at) => ({...row, at, chunks: row.chunks ?? [], boxes: null}));
    const all = rows.flatMap(row => row.chunks.map((chunk, at) => ({row, chunk, at})));
    const scored = all.some(({chunk}) => "divergence" in chunk);
    let walked = -1;

    /* -- one chunk ------------------------------------------------------------------------------------------------ */

    function boxOf(row, chunk, at) {
      const box = make("div", {name: `chunk ${MARKS[kindOf(chunk)]}${chunk.role ? " role" : ""}`, tabindex: at ? -1 : 0});
      if ("divergence" in chunk) box.dataset.heat = heatOf(chunk.divergence);
      box.append(make("div", {name: "s"}, ...tokens(chunk.student)), make("div", {name: "t"}, ...tokens(chunk.teacher)));
      const said = [`student ${chunk.student.join(" ")}`, `teacher ${chunk.teacher.join(" ")}`, kindOf(chunk)];
      if ("divergence" in chunk) said.push(`divergence ${number(chunk.divergence)}`);
      box.setAttribute("aria-label", said.join(", "));
      box.chunk = chunk;
      box.classList.toggle("off", hidden.has(kindOf(chunk)));
      return box;
    }

    function side(name, list, ids, logprobs, sum, top) {
      const cells = list.map((token, i) => make("span", {name: "token"}, make("b", {text: token}),
        make("small", {text: ` ${ids[i]}${logprobs ? ` · ${number(logprobs[i])}` : ""}`})));
      const line = make("div", {name: "side"}, make("h4", {text: name}), make("div", {}, ...cells));
      if (sum !== undefined) line.append(make("div", {name: "sum", text: `${number(sum)} nats`}));
      if (top) line.append(make("div", {name: "top", text: `says ${top.map(([t, p]) => `${t} ${share(p)}`).join(", ")}`}));
      return line;
    }

    function show(box) {
      const c = box.chunk, bytes = c.bytes.match(/../g) ?? [];
      const shown = bytes.slice(0, 24).join(" ") + (bytes.length > 24 ? " …" : "");
      const head = make("div", {name: "what"}, make("span", {name: `chunk ${MARKS[kindOf(c)]}`, text: kindOf(c)}),
        make("code", {text: c.role ? "special tokens of one role" : `${shown} (${bytes.length} ${bytes.length === 1 ? "byte" : "bytes"})`}));
      const parts = [head, side(data.names[0], c.student, c.student_ids, c.student_logprobs, c.student_logprob, c.student_top),
        side(data.names[1], c.teacher, c.teacher_ids, c.teacher_logprobs, c.teacher_logprob, c.teacher_top)];
      if ("divergence" in c) {
        const gain = (c.teacher_logprob ?? NaN) - (c.student_logprob ?? NaN);
        const ahead = Number.isFinite(gain) ? `; ${gain >= 0 ? "teacher" : "student"} ahead by ${number(Math.abs(gain))}` : "";
        parts.push(make("div", {name: "gap", text: `divergence ${number(c.divergence, 3)} nats${ahead}`}));
      }
      tip.replaceChildren(...parts);
      tip.hidden = false;
      const place = box.getBoundingClientRect();
      const below = place.bottom + 8 + tip.offsetHeight < innerHeight;
      tip.style.top = `${Math.max(below ? place.bottom + 8 : place.top - tip.offsetHeight - 8, 8)}px`;
      tip.style.left = `${Math.max(Math.min(place.left, innerWidth - tip.offsetWidth - 12), 8)}px`;
    }
    const hide = () => { tip.hidden = true; };

    /* -- rows ----------------------------------------------------------------------------------------------------- */

    const watcher = new IntersectionObserver(seen => {
      for (const entry of seen) if (entry.isIntersecting) fill(rows[Number(entry.target.dataset.row)]);
    }, {rootMargin: "900px"});

    function fill(row) {
      if (row.boxes) return;
      watcher.unobserve(row.node);
      row.boxes = row.chunks.map((chunk, at) => boxOf(row, chunk, at));
      const parts = row.boxes.flatMap((box, at) => (row.chunks[at].ends_line ? [box, make("div", {name: "br"})] : [box]));
      row.flow.replaceChildren(...parts);
      row.flow.style.minHeight = "";
    }

    function build(row) {
      const values = row.chunks.flatMap(c => ("divergence" in c ? [c.divergence] : []));
      row.mean = mean(values);
      row.largest = values.reduce((a, b) => Math.max(a, b), 0);
      const facts = row.problem ? [] : [`${count(row.chunks.length)} chunks`];
      if (values.length) facts.push(`divergence ${number(row.mean, 3)} on average, ${number(row.largest)} at most`);
      row.flow = make("div", {name: "flow"});
      row.flow.style.minHeight = `${Math.ceil(row.chunks.length / 12) * 46}px`;
      row.node = make("article", {name: "panel row", "data-row": row.at});
      if (row.source || facts.length) {
        row.node.append(make("h3", {}, make("span", {text: row.source}), make("small", {text: facts.join(", ")})));
      }
      if (row.problem) row.node.append(make("p", {name: "note", text: `Left out: ${row.problem}`}));
      row.node.append(row.flow, ...lost(row), ...reads(row));
      watcher.observe(row.node);
      return row.node;
    }

    /* What of the supervised text is not compared, and why. */
    function lost(row) {
      const pieces = row.left_out ?? [], counts = row.skipped ?? [];
      if (!pieces.length && !counts.length) return [];
      const body = [...pieces.map(p => [p.side, `message ${p.message}, ${p.kind}`, p.text, `${count(p.tokens)} tokens: ${p.why}`]),
        ...counts.map(c => [c.side, "counted", "", `${count(c.count)} ${c.why}`])];
      const table = make("table", {}, make("tbody", {}, ...body.map(([side, where, text, why]) => make("tr", {},
        make("td", {name: "text sub", text: side}), make("td", {name: "text sub", text: where}),
        make("td", {name: "text"}, make("code", {text: text.length > 300 ? `${text.slice(0, 300)}…` : text})),
        make("td", {name: "text", text: why})))));
      const box = make("details", {name: "more"}, make("summary", {text: `What is left out here (${count(body.length)})`}), table);
      box.open = pieces.length > 0 && rows.length === 1;
      return [box];
    }

    /* The whole rendering of each side, its supervised parts marked. */
    function reads(row) {
      return Object.entries(row.reads ?? {}).map(([name, {tokens: own, segments}]) => {
        const taught = new Set(segments.flatMap(([, from, to]) => Array.from({length: to - from}, (_, i) => from + i)));
        const text = make("pre", {}, ...own.map((token, at) => make(taught.has(at) ? "mark" : "span", {name: "target", text: token})));
        return make("details", {name: "reads"}, make("summary", {text: `What the ${name} reads (${count(own.length)} tokens)`}), text);
      });
    }

    /* -- choice and order ----------------------------------------------------------------------------------------- */

    function choose() {
      for (const row of rows) {
        row.boxes?.forEach(box => box.classList.toggle("off", hidden.has(kindOf(box.chunk))));
        row.node.hidden = row.chunks.length > 0 && row.chunks.every(chunk => hidden.has(kindOf(chunk)));
      }
      walked = -1;
      listMost();
    }

    function order(by) {
      const value = {file: row => -row.at, mean: row => row.mean, largest: row => row.largest}[by];
      list.replaceChildren(...[...rows].sort((a, b) => value(b) - value(a)).map(row => row.node));
    }

    const shown = () => all.filter(({chunk}) => !hidden.has(kindOf(chunk)));
    const disagreeing = () => shown().filter(({chunk}) => "divergence" in chunk)
      .sort((a, b) => b.chunk.divergence - a.chunk.divergence);

    function focus({row, at}) {
      fill(row);
      row.boxes[at].scrollIntoView({block: "center"});
      row.boxes[at].focus({preventScroll: true});
    }

    function listMost() {
      const panel = viewer.querySelector(".most");
      const most = scored ? disagreeing().slice(0, MOST_LISTED) : [];
      panel.hidden = !most.length;
      if (!most.length) return;
      const lines = most.map(found => {
        const {row, chunk, at} = found;
        const before = row.chunks.slice(Math.max(at - 8, 0), at).flatMap(c => c.student).join("");
        const line = make("tr", {tabindex: 0}, make("td", {text: number(chunk.divergence, 3)}),
          make("td", {name: "text"}, make("code", {},
            make("span", {name: "sub", text: before.slice(-36)}), make("b", {text: chunk.student.join("")}))),
          make("td", {name: "text sub", text: (chunk.student_top ?? []).map(([t, p]) => `${t} ${share(p)}`).join("  ")}),
          make("td", {name: "text sub", text: (chunk.teacher_top ?? []).map(([t, p]) => `${t} ${share(p)}`).join("  ")}),
          make("td", {name: "text sub", text: row.source}));
        line.addEventListener("click", () => focus(found));
        line.addEventListener("keydown", event => { if (event.key === "Enter") focus(found); });
        return line;
      });
      const heads = ["divergence", "text", `${data.names[0]} says`, `${data.names[1]} says`, "row"];
      const head = make("tr", {}, ...heads.map((text, i) => make("th", i ? {text, name: "text"} : {text})));
      panel.replaceChildren(make("summary", {text: `Where they disagree most (${count(lines.length)} chunks)`}),
        make("div", {name: "panel tall"}, make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines))));
    }

    function tools() {
      const bar = viewer.querySelector(".tools");
      for (const kind of KINDS) {
        const many = all.filter(({chunk}) => kindOf(chunk) === kind).length;
        if (!many) continue;
        const button = make("button", {type: "button", name: "kind", "aria-pressed": "true"},
          make("span", {name: `chunk ${MARKS[kind]}`, text: kind}), ` ${count(many)}`);
        button.addEventListener("click", () => {
          if (!hidden.delete(kind)) hidden.add(kind);
          button.setAttribute("aria-pressed", String(!hidden.has(kind)));
          choose();
        });
        bar.append(button);
      }
      if (scored && rows.length > 1) {
        const pick = make("select", {"aria-label": "Order of rows"});
        for (const [value, text] of [["file", "rows as in the file"], ["mean", "rows by mean divergence"], ["largest", "rows by largest divergence"]]) {
          pick.append(make("option", {value, text}));
        }
        pick.addEventListener("change", () => order(pick.value));
        bar.append(pick);
      }
      if (scored) {
        const heat = make("button", {type: "button", "aria-pressed": "true", text: "colour by divergence"});
        viewer.classList.add("heated");
        heat.addEventListener("click", () => heat.setAttribute("aria-pressed", String(viewer.classList.toggle("heated"))));
        bar.append(heat);
      }
      bar.append(make("span", {name: "hints"}, make("kbd", {text: "j"}), " ", make("kbd", {text: "k"}),
        scored ? " most apart " : " not 1:1 ", make("kbd", {text: "← →"}), " chunks ", make("kbd", {text: "Esc"}), " close"));
    }

    /* -- pointer and keys ----------------------------------------------------------------------------------------- */

    const boxUnder = target => target.closest?.(".rows .chunk");
    list.addEventListener("pointerover", event => { const box = boxUnder(event.target); if (box) show(box); else hide(); });
    list.addEventListener("pointerleave", hide);
    list.addEventListener("click", event => boxUnder(event.target)?.focus());
    list.addEventListener("focusin", event => { const box = boxUnder(event.target); if (box) show(box); });
    list.addEventListener("focusout", hide);
    list.addEventListener("keydown", event => {
      const box = boxUnder(event.target), step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!box || !step) return;
      const row = rows[Number(box.closest(".row").dataset.row)];
      let at = row.boxes.indexOf(box) + step;
      while (row.boxes[at]?.classList.contains("off")) at += step;
      if (!row.boxes[at]) return;
      event.preventDefault();
      box.tabIndex = -1;
      row.boxes[at].tabIndex = 0;
      row.boxes[at].focus();
    });
    document.addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      if (event.key === "Escape") return hide();
      const step = {j: 1, k: -1}[event.key];
      if (!step) return;
      const places = scored ? disagreeing() : shown().filter(({chunk}) => kindOf(chunk) !== "1:1");
      if (!places.length) return;
      walked = (walked + step + places.length) % places.length;
      focus(places[walked]);
    });

    tools();
    list.replaceChildren(...rows.map(build));
    listMost();
  }

  document.querySelectorAll(".viewer").forEach(start);
})();
