// A model's text as page elements: code in backticks is set as code, all else stays as it is.
// Text enters the page as text alone, never as markup.

const CODE = /\n*```[^\n`]*\n([\s\S]*?)(?:\n```[ \t]*(?:\n+|$)|$)|`([^`\n]+)`/g;

export function show(element, text) {
  const parts = [];
  let place = 0;
  for (const found of text.matchAll(CODE)) {
    parts.push(text.slice(place, found.index));
    parts.push(found[2] === undefined ? block(found[1]) : code(found[2]));
    place = found.index + found[0].length;
  }
  parts.push(text.slice(place));
  element.replaceChildren(...parts.filter((part) => part !== ""));
}

function code(text) {
  const element = document.createElement("code");
  element.textContent = text;
  return element;
}

function block(text) {
  const element = document.createElement("pre");
  element.append(code(text));
  return element;
}
