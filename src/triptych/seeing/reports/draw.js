// Colours of the page, curves, and pictures of maps.
const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mix = (from, to, share) => {
  const [a, b] = [parse(from), parse(to)];
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join(",")})`;
};

const SVG = "http://www.w3.org/2000/svg";
function plot(title, curves, top) {
  const [width, height, left, bottom] = [420, 170, 40, 24];
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", title);
  const draw = (tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text) node.textContent = text;
    svg.append(node);
  };
  const most = Math.max(2, ...curves.map((curve) => curve.values.length));
  const x = (i) => left + ((width - left - 10) * i) / (most - 1);
  const y = (value) => height - bottom - ((height - bottom - 22) * value) / top;
  draw("text", { x: left, y: 12 }, title);
  for (const value of [0, top / 2, top]) {
    draw("line", { x1: left, x2: width - 10, y1: y(value), y2: y(value), stroke: "var(--line)" });
    draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, String(value));
  }
  draw("text", { x: left, y: height - 8 }, "1");
  draw("text", { x: width - 10, y: height - 8, "text-anchor": "end" }, String(most));
  curves.forEach((curve, number) => {
    const path = curve.values.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)},${y(value).toFixed(1)}`).join("");
    const stroke = `var(--${{ qk: "s1", ov: "s2", qv: "s3", kv: "s4", chance: "s6" }[curve.of]})`;
    draw("path", { d: path, fill: "none", stroke, "stroke-width": 2, "stroke-dasharray": ["", "6 3", "2 3"][number] });
    const label = { x: width - 10 - 66 * (curves.length - 1 - number), y: 12, "text-anchor": "end", style: `fill:${stroke}` };
    draw("text", label, curve.name);
  });
  return svg;
}

// One hexadecimal digit a block of entries
function picture(side, rows) {
  const name = `W_${side.toUpperCase()}`;
  const canvas = make("canvas", { class: side, width: rows[0].length, height: rows.length, role: "img", "aria-label": `sizes of the entries of ${name}` });
  const pen = canvas.getContext("2d");
  const [zero, one] = ["--zero", "--one"].map(colour);
  rows.forEach((row, y) => [...row].forEach((digit, x) => {
    pen.fillStyle = mix(zero, one, parseInt(digit, 16) / 15);
    pen.fillRect(x, y, 1, 1);
  }));
  return make("figure", {}, make("figcaption", {}, name), canvas);
}
