/* What every page does once it is there: the light or dark theme, and its charts; data-drawn says after how many
   milliseconds they were there. */
"use strict";

document.querySelector("button.theme")?.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
Charts.start();
document.documentElement.dataset.drawn = Math.round(performance.now());
