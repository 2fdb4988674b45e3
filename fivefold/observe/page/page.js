// A pointer over a chart is told where it is and each curve's value there.
const charts = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const CLOSE = 5;  // units of the drawing: a point this near is of the same place

function where(name, place) {
  return `${name} ${typeof place === "number" ? place.toLocaleString("en") : place}`;
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const {lines, across} = charts[figure.dataset.chart];
  const svg = figure.querySelector("svg"), tip = figure.querySelector(".tip");
  const cross = document.createElementNS(SVG, "path");
  cross.setAttribute("class", "cross");
  svg.append(cross);
  const leave = () => { tip.hidden = true; cross.removeAttribute("d"); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const lead = nearest(lines[0].points, x);
    cross.setAttribute("d", `M${lead[0]} 12V${svg.viewBox.baseVal.height - 40}`);
    tip.replaceChildren(where(across, lead[2]));
    for (const line of lines) {
      const point = nearest(line.points, lead[0]);
      const at = Math.abs(point[0] - lead[0]) < CLOSE ? "" : ` (${where(across, point[2])})`;
      tip.append(document.createElement("br"), `${line.label} ${point[3]}${at}`);
    }
    tip.hidden = false;
    const left = lead[0] / scale + 12;
    tip.style.left = `${left + tip.offsetWidth > box.width ? left - tip.offsetWidth - 24 : left}px`;
  });
}
