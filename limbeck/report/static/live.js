/* The page of a run that goes on: asks its server every two seconds, and takes over what has changed. Curves are drawn
   anew where they stand, so that a reader's choices, open parts and place on the page stay as they are. */
"use strict";

(() => {
  const PERIOD = 2000;
  const state = document.querySelector(".live");
  let version = null;

  async function ask() {
    try {
      const answer = await fetch("/", {headers: version ? {"If-None-Match": version} : {}, cache: "no-store"});
      if (answer.status === 200) {
        version = answer.headers.get("ETag");
        update(new DOMParser().parseFromString(await answer.text(), "text/html"));
        say("live", `live, ${new Date().toLocaleTimeString("en-GB")}`);
      } else if (answer.status === 304) {
        state.classList.remove("lost");
      } else {
        say("live lost", `no news: the server says ${answer.status}`);
      }
    } catch {
      say("live lost", "no news: the server is gone");
    }
    setTimeout(ask, PERIOD);
  }

  function say(kind, text) {
    state.className = kind;
    state.textContent = text;
  }

  function update(news) {
    document.title = news.title;
    Charts.readAxes(news);
    const bar = document.querySelector(".toolbar"), newBar = news.querySelector(".toolbar");
    const options = node => [...(node?.querySelectorAll("button") ?? [])].map(button => button.value).join();
    if (options(bar) !== options(newBar)) return location.reload(); // the first charts, or the first tokens
    const parts = [...news.querySelectorAll("[data-part]")];
    const old = new Map([...document.querySelectorAll("[data-part]")].map(part => [part.dataset.part, part]));
    let last = null;
    for (const part of parts) {
      const here = old.get(part.dataset.part);
      old.delete(part.dataset.part);
      if (part.querySelector(".viewer")) {
        // made by a script of its own, from data that a run writes once
        if (here?.querySelector("script").textContent !== part.querySelector("script").textContent) return location.reload();
        last = here;
        continue;
      }
      if (!here) {
        last = insert(document.importNode(part, true), last);
        continue;
      }
      last = here;
      if (!updateCharts(here, part)) replace(here, part);
    }
    for (const gone of old.values()) gone.remove();
  }

  function insert(part, after) {
    if (after) after.after(part);
    else document.querySelector("main").append(part);
    Charts.start(part);
    return part;
  }

  const captions = part => [...part.querySelectorAll("figure.chart figcaption")].map(caption => caption.textContent);

  /* Whether the part holds the same charts as before, which then have their new data. */
  function updateCharts(here, part) {
    const figures = [...here.querySelectorAll("figure.chart")];
    if (!figures.length || captions(here).join("\n") !== captions(part).join("\n")) return false;
    part.querySelectorAll("figure.chart").forEach((figure, i) => {
      const mine = figures[i].querySelector("script"), theirs = figure.querySelector("script").textContent;
      const chart = Charts.known.get(figures[i]);
      if (mine.textContent !== theirs) {
        mine.textContent = theirs;
        figures[i].querySelector("svg").setAttribute("aria-label", figure.querySelector("svg").getAttribute("aria-label"));
        chart.read();
      }
      chart.draw(); // its place on an axis of tokens or time may have moved
    });
    return true;
  }

  function replace(here, part) {
    if (here.innerHTML === part.innerHTML) return;
    const open = [...here.querySelectorAll("details")].map(details => details.open);
    here.replaceChildren(...document.importNode(part, true).childNodes);
    here.querySelectorAll("details").forEach((details, i) => (details.open = open[i] ?? false));
    Charts.start(here);
  }

  ask();
})();
