/* A node with text, class, attributes and children. Text is never read as markup. */
"use strict";

function make(tag, {text, name, ...attributes} = {}, ...children) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

