/* The page of traces: search over all messages, and keys that walk from failed call to failed call. Text of traces is
   only ever compared here, never made into markup. */
"use strict";

(() => {
  const search = document.querySelector(".finder input");
  if (!search) return;
  const messages = [...document.querySelectorAll(".message")];
  const texts = messages.map(message => message.textContent.toLowerCase());
  const traces = [...document.querySelectorAll(".trace")];
  const status = document.querySelector(".finder .found");
  let at = null;

  function filter() {
    const wanted = search.value.trim().toLowerCase();
    let count = 0;
    messages.forEach((message, i) => {
      const found = texts[i].includes(wanted);
      message.hidden = !found;
      count += found;
    });
    for (const trace of traces) trace.hidden = Boolean(wanted) && !trace.querySelector(".message:not([hidden])");
    status.textContent = wanted ? `${count.toLocaleString("en")} of ${messages.length.toLocaleString("en")} messages` : "";
  }

  /* The next of `places` after (or before) the one that was shown last. */
  function walk(places, step) {
    const shown = places.filter(place => !place.hidden && place.offsetParent);
    if (!shown.length) return;
    let next = shown.indexOf(at) + step;
    if (!shown.includes(at)) {
      const after = at === null ? 0 : shown.findIndex(p => at.compareDocumentPosition(p) & Node.DOCUMENT_POSITION_FOLLOWING);
      next = step > 0 ? (after < 0 ? 0 : after) : (after < 0 ? shown.length : after) - 1;
    }
    at = shown[(next + shown.length) % shown.length];
    document.querySelectorAll(".current").forEach(old => old.classList.remove("current"));
    at.classList.add("current");
    at.scrollIntoView({block: "start"});
    at.focus({preventScroll: true});
  }

  search.addEventListener("input", filter);
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      search.value = "";
      filter();
      search.blur();
      return;
    }
    if (event.target === search) return;
    const keys = {
      "/": () => search.focus(),
      j: () => walk([...document.querySelectorAll(".message.wrong")], 1),
      k: () => walk([...document.querySelectorAll(".message.wrong")], -1),
      n: () => walk(traces, 1),
      p: () => walk(traces, -1),
      d: () => document.querySelector("button.theme").click(),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
})();
