// A small chart of the last minutes: a value, a remark and one or two lines.

const SVG = "http://www.w3.org/2000/svg";
const SECONDS = 120;
const WIDTH = SECONDS - 1, HEIGHT = 40;

export class Chart {
  // `top`: the upper end of the axis, or null for the highest value seen.
  constructor(parent, title, { top = null, keys = [] } = {}) {
    this.top = top;
    this.history = [];
    const figure = document.createElement("figure");
    figure.setAttribute("aria-label", title);
    const caption = append(figure, "figcaption");
    append(caption, "span", "what").textContent = title;
    this.value = append(caption, "span", "value");
    this.drawing = document.createElementNS(SVG, "svg");
    this.drawing.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.drawing.setAttribute("preserveAspectRatio", "none");
    this.drawing.setAttribute("aria-hidden", "true");
    figure.append(this.drawing);
    this.shapes = [];
    this.path("base").setAttribute("d", `M0 ${HEIGHT}H${WIDTH}`);
    for (const order of ["second", ""].slice(keys.length > 1 ? 0 : 1)) {
      this.shapes.unshift([this.path(`area ${order}`), this.path(`line ${order}`)]);
    }
    const legend = append(figure, "div", "remark");
    for (const [place, key] of keys.entries()) {
      append(legend, "span", `key ${place ? "second" : ""}`).textContent = key;
    }
    this.remark = append(legend, "span");
    parent.append(figure);
  }

  path(className) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", className);
    this.drawing.append(path);
    return path;
  }

  // One number a line, or null where nothing is known.
  push(values, text, remark = "") {
    this.history.push(values);
    this.history.splice(0, this.history.length - SECONDS);
    this.value.textContent = text;
    this.remark.textContent = remark;
    const known = this.history.flatMap((each) => each ?? []);
    const top = this.top ?? Math.max(1, ...known);
    for (const [place, [area, line]] of this.shapes.entries()) {
      const points = this.history.map((each) => each && HEIGHT - (each[place] / top) * HEIGHT);
      area.setAttribute("d", runs(points).map(closed).join(""));
      line.setAttribute("d", runs(points).map(open).join(""));
    }
  }
}

// Stretches of [x, y] without a gap; the newest point is at the right.
function runs(points) {
  const found = [[]], start = SECONDS - points.length;
  points.forEach((y, place) => {
    if (y === null) found.push([]);
    else found.at(-1).push([start + place, y]);
  });
  return found.filter((run) => run.length);
}

function open(run) {
  return `M${run.map(([x, y]) => `${x} ${y.toFixed(2)}`).join("L")}${run.length > 1 ? "" : "h.5"}`;
}

function closed(run) {
  return `${open(run)}L${run.at(-1)[0]} ${HEIGHT}H${run[0][0]}Z`;
}

function append(parent, name, className = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  parent.append(element);
  return element;
}
