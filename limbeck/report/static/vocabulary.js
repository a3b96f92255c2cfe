/* The explorer of two vocabularies. Its data is columns of numbers and bytes, unpacked here; the search compares bytes.
   Tokens reach the page through textContent alone. */
"use strict";

(() => {
  const MOST_FOUND = 80, MOST_MEMBERS = 120, MOST_BRANCHES = 40, DEEPEST = 12;
  const ARRAYS = {int32: Int32Array, uint16: Uint16Array, uint8: Uint8Array};
  const MARKS = {" ": "·", "\n": "⏎", "\r": "␍", "\t": "⇥"};

  function make(tag, {text, name, ...attributes} = {}, ...children) {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }
  const count = value => value.toLocaleString("en");

  async function unpack({parts, data}) {
    const packed = Uint8Array.from(atob(data), character => character.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const raw = await new Response(stream).arrayBuffer();
    const columns = {};
    let at = 0;
    for (const [name, type, length] of parts) {
      columns[name] = new ARRAYS[type](raw, at, length);
      at += length * ARRAYS[type].BYTES_PER_ELEMENT;
    }
    return columns;
  }

  function offsets(lengths) {
    const out = new Uint32Array(lengths.length + 1);
    for (let i = 0; i < lengths.length; i++) out[i + 1] = out[i] + lengths[i];
    return out;
  }

  /* One vocabulary: bytes, cell and spelling of every id. */
  class Side {
    constructor(key, name, columns, roles) {
      Object.assign(this, {key, name, roles, cell: columns[`${key}.cell`], counts: columns[`${key}.count`]});
      this.bytes = columns[`${key}.bytes`];
      this.at = offsets(columns[`${key}.length`]);
      this.spelling = columns[`${key}.spelling`];
      this.spelledAt = offsets(columns[`${key}.pieces`]);
      this.classes = columns[`${key}.class`];
      this.scripts = columns[`${key}.script`];
      this.size = this.cell.length;
      this.decoder = new TextDecoder("utf-8", {fatal: true});
    }
    bytesOf(id) { return this.bytes.subarray(this.at[id], this.at[id + 1]); }
    spell(id) { return this.spelling.subarray(this.spelledAt[id], this.spelledAt[id + 1]); }
    count(id) { return this.counts ? this.counts[id] : 0; }
    label(id) {
      const own = this.bytesOf(id);
      if (!own.length) return `[${this.roles[id] ?? "empty"}]`;
      try {
        return [...this.decoder.decode(own)].map(c => MARKS[c] ?? (/[\p{C}\p{Z}]/u.test(c) ? `\\u{${c.codePointAt(0).toString(16)}}` : c)).join("");
      } catch {
        return [...own].map(b => (b > 32 && b < 127 ? String.fromCharCode(b) : `\\x${b.toString(16).padStart(2, "0")}`)).join("");
      }
    }
  }

  /* Bytes that a query asks for: text, or 0xHEX. */
  function queryBytes(query) {
    const hex = query.match(/^(?:0x|\\x)([0-9a-f\s]+)$/i);
    if (hex) return Uint8Array.from((hex[1].replace(/\s/g, "").match(/../g) ?? []).map(h => parseInt(h, 16)));
    return new TextEncoder().encode(query.replaceAll("·", " ").replaceAll("⏎", "\n").replaceAll("⇥", "\t"));
  }

  function place(bytes, from, to, wanted) {
    const last = to - wanted.length;
    for (let i = from; i <= last; i++) {
      let k = 0;
      while (k < wanted.length && bytes[i + k] === wanted[k]) k++;
      if (k === wanted.length) return i - from;
    }
    return -1;
  }

  function search(sides, query) {
    const id = query.match(/^#?(\d+)$/);
    const byId = id ? sides.flatMap(side => (Number(id[1]) < side.size ? [{side, id: Number(id[1]), rank: query[0] === "#" ? -1 : 3}] : [])) : [];
    if (query[0] === "#" && byId.length) return byId;
    const wanted = queryBytes(query), found = [];
    const spaced = Uint8Array.from([32, ...wanted]);
    if (!wanted.length) return [];
    for (const side of sides) {
      for (let i = 0; i < side.size; i++) {
        const from = side.at[i], to = side.at[i + 1];
        if (to - from < wanted.length) continue;
        const where = place(side.bytes, from, to, wanted);
        if (where < 0) continue;
        const whole = to - from === wanted.length || (to - from === spaced.length && !place(side.bytes, from, to, spaced));
        found.push({side, id: i, rank: whole ? 0 : where === 0 || side.bytes[from] === 32 && where === 1 ? 1 : 2, size: to - from});
      }
    }
    for (const side of sides) {
      for (const [i, role] of Object.entries(side.roles)) if (role.includes(query)) found.push({side, id: Number(i), rank: 1, size: 0});
    }
    const chosen = found.sort((a, b) => a.rank - b.rank || b.side.count(b.id) - a.side.count(a.id) || a.size - b.size || a.id - b.id);
    return [...chosen, ...byId];
  }

  async function start(explorer) {
    const source = explorer.querySelector("script");
    const data = JSON.parse(source.textContent);
    source.remove();
    const status = explorer.querySelector(".found"), input = explorer.querySelector("input");
    const results = explorer.querySelector(".results"), detail = explorer.querySelector(".detail");
    const columns = await unpack(data);
    const sides = ["s", "t"].map((key, i) => new Side(key, data.names[i], columns, data.roles[i]));
    const other = side => sides[side === sides[0] ? 1 : 0];
    const summary = `${count(sides[0].size)} and ${count(sides[1].size)} ids`;
    const link = (side, id) => make("a", {name: `tok ${side.key}`, href: `#${side.key}${id}`, text: side.label(id), title: `${side.name} ${id}`});
    const heading = (text, more) => make("h3", {text}, ...(more ? [make("small", {text: more})] : []));

    /* What there is to see before anybody asks: the cells with most tokens, by their shortest one. */
    function crowded() {
      const sizes = new Map(), shortest = new Map();
      for (const side of sides) {
        side.cell.forEach((cell, id) => {
          if (cell < 0) return;
          sizes.set(cell, (sizes.get(cell) ?? 0) + 1);
          const best = shortest.get(cell);
          if (side === sides[0] && (best === undefined || side.bytesOf(id).length < side.bytesOf(best).length)) shortest.set(cell, id);
        });
      }
      const most = [...sizes].sort((a, b) => b[1] - a[1]).slice(0, 40);
      results.replaceChildren(make("h4", {text: "Largest cells"}), ...most.map(([cell, size]) => hit(sides[0], shortest.get(cell), [`${count(size)} tokens`])));
    }

    const hit = (side, id, facts) => make("a", {name: "hit", href: `#${side.key}${id}`, role: "option"},
      make("code", {name: `tok ${side.key}`, text: side.label(id)}), make("small", {text: facts.join(" · ")}));

    function look() {
      const query = input.value;
      if (!query) { status.textContent = summary; crowded(); return; }
      const found = search(sides, query);
      status.textContent = `${count(found.length)} tokens${found.length > MOST_FOUND ? `, the first ${MOST_FOUND}` : ""}`;
      results.replaceChildren(...found.slice(0, MOST_FOUND).map(({side, id}) =>
        hit(side, id, [side.name, `#${id}`, ...(side.counts ? [`${count(side.count(id))} chunks`] : [])])));
    }

    /* Tokens of both sides in one cell, the most frequent first. */
    function cell(number) {
      return sides.map(side => {
        const members = [];
        side.cell.forEach((own, id) => { if (own === number) members.push(id); });
        members.sort((a, b) => side.count(b) - side.count(a) || a - b);
        const shown = members.slice(0, MOST_MEMBERS).map(id => link(side, id));
        const more = members.length > MOST_MEMBERS ? [make("span", {name: "sub", text: `and ${count(members.length - MOST_MEMBERS)} more`})] : [];
        return make("div", {}, make("h4", {text: `${side.name}: ${count(members.length)}`}), make("div", {name: "toks"}, ...shown, ...more));
      });
    }

    /* The coarse side's tokens whose spelling begins with the fine side's `prefix`. */
    function below(fine, ids, prefix) {
      const coarse = other(fine), ends = [], branches = new Map();
      for (const id of ids) {
        const spelled = coarse.spell(id);
        if (spelled.length === prefix.length) { ends.push(id); continue; }
        const next = spelled[prefix.length];
        if (!branches.has(next)) branches.set(next, []);
        branches.get(next).push(id);
      }
      const weigh = list => list.reduce((sum, id) => sum + coarse.count(id), 0);
      const ordered = [...branches].map(([next, list]) => ({next, list, weight: weigh(list)}))
        .sort((a, b) => b.weight - a.weight || b.list.length - a.list.length || a.next - b.next);
      const items = ends.map(id => make("li", {name: "end"}, link(coarse, id), make("small", {text: ` ends here${coarse.counts ? `, ${count(coarse.count(id))} chunks` : ""}`})));
      for (const {next, list, weight} of ordered.slice(0, MOST_BRANCHES)) {
        const text = `${count(list.length)} tokens${coarse.counts ? `, ${count(weight)} chunks` : ""}`;
        const node = make("details", {}, make("summary", {}, make("code", {name: `tok ${fine.key}`, text: fine.label(next)}), make("small", {text: ` ${text}`})));
        node.addEventListener("toggle", () => {
          if (node.open && node.children.length === 1 && prefix.length < DEEPEST) node.append(below(fine, list, [...prefix, next]));
        });
        items.push(make("li", {}, node));
      }
      if (ordered.length > MOST_BRANCHES) items.push(make("li", {name: "sub", text: `${count(ordered.length - MOST_BRANCHES)} further branches`}));
      return make("ul", {name: "tree"}, ...items);
    }

    function open(side, id) {
      const coarse = other(side), spelled = [...side.spell(id)], bytes = [...side.bytesOf(id)];
      const facts = [`${side.name} #${id}`, data.classes[side.classes[id]], data.scripts[side.scripts[id]]];
      if (side.counts) facts.push(`${count(side.count(id))} chunks begin with it`);
      const parts = [make("h2", {}, make("code", {name: `tok ${side.key}`, text: side.label(id)}), make("small", {text: facts.join(" · ")})),
        make("p", {name: "sub", text: bytes.map(b => b.toString(16).padStart(2, "0")).join(" ") || `special token: ${side.roles[id] ?? "no token"}`}),
        heading(`How ${coarse.name} spells it`, spelled.length === 1 ? "one token" : spelled.length ? `${spelled.length} tokens` : ""),
        make("div", {name: "toks"}, ...(spelled.length ? spelled.map(piece => link(coarse, piece)) : [make("span", {name: "sub", text: "it cannot"})]))];
      const number = side.cell[id];
      parts.push(heading("Its cell", number < 0 ? "none: the other side cannot say it" : "tokens that neither model can tell apart by the next token alone"));
      if (number >= 0) parts.push(...cell(number));
      const trees = [[side, id], ...(spelled.length ? [[coarse, spelled[0]]] : [])];
      for (const [fine, first] of trees) {
        const spelt = other(fine), beginning = [];
        for (let i = 0; i < spelt.size; i++) if (spelt.spelledAt[i + 1] > spelt.spelledAt[i] && spelt.spelling[spelt.spelledAt[i]] === first) beginning.push(i);
        const what = `${count(beginning.length)} of ${spelt.name}'s tokens, spelled by ${fine.name}`;
        parts.push(make("h3", {text: "The tree below "}, make("code", {name: `tok ${fine.key}`, text: fine.label(first)}), make("small", {text: what})));
        if (beginning.length) parts.push(below(fine, beginning, [first]));
      }
      detail.replaceChildren(...parts);
      detail.scrollTop = 0;
    }

    function fromAddress() {
      const [, key, id] = location.hash.match(/^#([st])(\d+)$/) ?? [];
      const side = sides.find(s => s.key === key);
      if (side && Number(id) < side.size) {
        open(side, Number(id));
        if (matchMedia("(max-width: 820px)").matches) detail.scrollIntoView({block: "start"});
        else explorer.scrollIntoView({block: "nearest"});
      }
    }

    let waiting;
    input.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(look, 60); });
    explorer.addEventListener("keydown", event => {
      const hits = [...results.querySelectorAll(".hit")], at = hits.indexOf(document.activeElement);
      const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
      if (event.target === input && event.key === "Enter" && hits.length) hits[0].click();
      if (!step || !(event.target === input || at >= 0)) return;
      event.preventDefault();
      (hits[at + step] ?? input).focus();
    });
    document.addEventListener("keydown", event => {
      if (event.key !== "/" || event.target === input) return;
      event.preventDefault();
      input.focus();
    });
    addEventListener("hashchange", fromAddress);
    look();
    fromAddress();
    explorer.dataset.ready = "true";
  }

  document.querySelectorAll(".explorer").forEach(start);
})();
