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
  let current = null;

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
    let next = shown.indexOf(current) + step;
    if (!shown.includes(current)) {
      const follows = p => current.compareDocumentPosition(p) & Node.DOCUMENT_POSITION_FOLLOWING;
      const after = current === null ? 0 : shown.findIndex(follows);
      next = step > 0 ? (after < 0 ? 0 : after) : (after < 0 ? shown.length : after) - 1;
    }
    show(shown[(next + shown.length) % shown.length]);
    current.focus({preventScroll: true});
  }

  function show(place) {
    current = place;
    document.querySelectorAll(".current").forEach(old => old.classList.remove("current"));
    place.classList.add("current");
    place.scrollIntoView({block: "start"});
  }

  const messageOf = anchor => document.getElementById(anchor)?.closest(".message");
  const failed = () => [...document.querySelectorAll(".message.wrong")];
  const keys = {
    "/": () => search.focus(),
    j: () => walk(failed(), 1),
    k: () => walk(failed(), -1),
    n: () => walk(traces, 1),
    p: () => walk(traces, -1),
    d: () => document.querySelector("button.theme").click(),
  };

  search.addEventListener("input", filter);
  for (const button of document.querySelectorAll(".finder .steps button")) {
    button.addEventListener("click", () => keys[button.value]());
  }
  window.addEventListener("hashchange", () => { current = messageOf(location.hash.slice(1)) ?? current; });
  const opens = messageOf(location.hash.slice(1) || document.querySelector(".finder").dataset.opens);
  if (opens) show(opens);
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      search.value = "";
      filter();
      search.blur();
      return;
    }
    if (event.target === search) return;
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
})();
