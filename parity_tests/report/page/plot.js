const series = JSON.parse(document.querySelector("#record").textContent).over_time;
const [width, height] = [360, 200];
const box = { left: 46, right: 350, top: 10, bottom: 160 };
const names = { torch: "torch", jax: "JAX" };

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** The decades that hold every error, the same in all plots, so that these can be compared. */
function decades() {
  const logs = series.flatMap((s) => [...s.torch, ...s.jax]).filter((x) => x > 0).map(Math.log10);
  const low = Math.floor(logs.reduce((a, b) => Math.min(a, b), 0));
  return [low, Math.max(Math.ceil(logs.reduce((a, b) => Math.max(a, b), low)), low + 1)];
}

const [low, high] = decades();

function y(error) {
  const above = Math.max(Math.log10(error), low) - low; // an error of 0 lies on the axis
  return box.bottom - ((box.bottom - box.top) * above) / (high - low);
}

function axes(steps, x) {
  const [across, down] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  const label = (text, at) => svg("text", { "text-anchor": "middle", ...at }, text);
  const elements = [
    label("step", { x: across, y: height - 8 }),
    label("relative error", { x: 10, y: down, transform: `rotate(-90 10 ${down})` }),
  ];
  for (let decade = low; decade <= high; decade++) {
    const at = y(10 ** decade);
    elements.push(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }));
    if ((decade - low) % 2 === 0) {
      elements.push(label(`1e${decade}`, { x: box.left - 6, y: at + 3.5, "text-anchor": "end" }));
    }
  }
  for (const step of new Set([1, ...[0.25, 0.5, 0.75, 1].map((part) => Math.ceil(part * steps))])) {
    elements.push(label(step, { x: x(step), y: box.bottom + 15 }));
  }
  return elements;
}

/** A line is broken where an error is not finite. */
function path(errors, x) {
  const points = errors.map((error, i) => error !== null && `${x(i + 1).toFixed(1)} ${y(error).toFixed(1)}`);
  return points.map((point, i) => (point ? `${points[i - 1] ? "L" : "M"}${point}` : "")).join("");
}

function legendEntry(style, text) {
  const [entry, reading] = [document.createElement("li"), document.createElement("span")];
  const sample = svg("path", { class: style, d: "M0 4H24" });
  entry.append(svg("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" }, sample), text, reading);
  return [entry, reading];
}

/** Under the pointer, the legend has the errors of the step. */
function showReadings(plot, readings, steps, x) {
  const cursor = svg("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  plot.append(cursor);
  plot.addEventListener("pointermove", ({ clientX }) => {
    const drawn = plot.getBoundingClientRect();
    const at = ((clientX - drawn.left) / drawn.width) * width;
    const part = Math.min(Math.max((at - box.left) / (box.right - box.left), 0), 1);
    const step = Math.round(1 + part * (steps - 1));
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(step));
    cursor.setAttribute("visibility", "visible");
    for (const [reading, errors] of readings) {
      reading.textContent = ` ${errors[step - 1]?.toExponential(1) ?? "not finite"}`;
    }
  });
  plot.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    for (const [reading] of readings) reading.textContent = "";
  });
}

function draw(figure) {
  const { case: name, platform } = figure.dataset;
  const own = series.filter((s) => s.case === name && s.platform === platform);
  const steps = own[0].torch.length;
  const x = (step) => box.left + ((box.right - box.left) * (step - 1)) / Math.max(steps - 1, 1);
  const title = `Error of ${name} on ${platform} over ${steps} steps`;
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  plot.append(...axes(steps, x));
  const [legend, readings] = [document.createElement("ul"), []];
  for (const errors of own) {
    for (const side of ["torch", "jax"]) {
      const style = `line ${side} ${errors.dtype}`;
      plot.append(svg("path", { class: style, d: path(errors[side], x) }));
      const [entry, reading] = legendEntry(style, `${names[side]} ${errors.dtype}`);
      legend.append(entry);
      readings.push([reading, errors[side]]);
    }
  }
  showReadings(plot, readings, steps, x);
  figure.append(plot, legend);
}

/** The cases in the table lead to their plots. */
function leadToPlots() {
  const figureAt = new Map(figures.map((figure) => [place(figure), figure]));
  for (const row of measured.filter((row) => figureAt.has(place(row)))) {
    const [figure, button] = [figureAt.get(place(row)), document.createElement("button")];
    button.title = "to its error over time";
    button.append(...row.cells[0].childNodes);
    button.addEventListener("click", () => {
      figure.scrollIntoView({ block: "center" });
      figure.focus({ preventScroll: true });
    });
    row.cells[0].append(button);
  }
}

figures.forEach(draw);
leadToPlots();
document.querySelector(".over-time").hidden = figures.length === 0;
