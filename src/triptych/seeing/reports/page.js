const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

// The pen of a canvas of this many CSS pixels, sharp on every screen.
function penOf(canvas, width, height) {
  const ratio = Math.max(1, devicePixelRatio);
  canvas.width = Math.ceil(width * ratio);
  canvas.height = Math.ceil(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return pen;
}

// Arrow keys move through places of a grid; the numbers of `data-at` end with row and column.
function moveByArrows(grid) {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  grid.addEventListener("keydown", (event) => {
    const from = event.target.closest("[data-at]");
    if (!from || !(event.key in steps)) return;
    event.preventDefault();
    const at = from.dataset.at.split(" ").map(Number);
    const column = at.pop() + steps[event.key][1];
    const row = at.pop() + steps[event.key][0];
    const next = grid.querySelector(`[data-at="${[...at, row, column].join(" ")}"]`);
    if (!next) return;
    from.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

const UNITS = { K: 1e3, M: 1e6, G: 1e9, T: 1e12, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, "µs": 1e-6, ms: 1e-3 };
// The number that a cell begins with ("1.05M", "0.04 [0.03, 0.05]"); NaN if it begins otherwise.
function numberOf(text) {
  const [, sign, digits, unit] = text.replaceAll(",", "").match(/^([+-]?)([\d.]+(?:e[+-]?\d+)?|inf|∞)\s*([A-Za-zµ]*)/) ?? [];
  const size = digits === "inf" || digits === "∞" ? Infinity : Number(digits) * (UNITS[unit] ?? 1);
  return sign === "-" ? -size : size;
}

// A head of a table sorts by its column: of numbers the largest first, then the smallest, then as it was.
const byName = new Intl.Collator("en", { numeric: true }).compare;
function sortBy(table, head, rows, texts, numbers) {
  const turns = numbers ? [null, "descending", "ascending"] : [null, "ascending", "descending"];
  const turn = turns[(turns.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  const order = [...rows.keys()];
  if (turn) {
    head.setAttribute("aria-sort", turn);
    const compare = numbers ? (a, b) => numbers[a] - numbers[b] : (a, b) => byName(texts[a], texts[b]);
    const sign = turn === "descending" ? -1 : 1;
    order.sort((a, b) => (texts[a] === "") - (texts[b] === "") || sign * compare(a, b));
  }
  table.tBodies[0].append(...order.map((i) => rows[i]));
}

for (const table of document.querySelectorAll(".table table")) {
  const rows = [...table.tBodies[0].rows];
  [...(table.tHead?.rows[0].cells ?? [])].forEach((head, column) => {
    const texts = rows.map((row) => row.cells[column].textContent);
    const numbers = texts.map(numberOf);
    // The first column has names, also where they are numbers: head 3.10 comes after head 3.2.
    const areNumbers = column > 0 && numbers.every((number, i) => texts[i] === "" || !Number.isNaN(number));
    if ("shaded" in head.dataset) {
      const known = numbers.filter(Number.isFinite);
      const [low, high] = [Math.min(...known), Math.max(...known)];
      rows.forEach((row, i) => {
        if (Number.isFinite(numbers[i])) row.cells[column].style.setProperty("--share", (numbers[i] - low) / (high - low || 1));
      });
    }
    if (rows.length < 3 || !head.textContent) return;
    const button = make("button", { type: "button" }, ...head.childNodes);
    button.addEventListener("click", () => sortBy(table, head, rows, texts, areNumbers ? numbers : null));
    head.append(button);
  });
}
