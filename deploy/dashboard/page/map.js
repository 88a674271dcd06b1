// A pool as a map: a cell for each block, or for several blocks of a large pool. Works by mouse, touch and keyboard.

import { count } from "./dom.js";

const GAP = 2;
const SMALLEST = 9;
const LARGEST = 24;
const HEIGHT = 220;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export class PoolMap {
  // `onPick(first, count)` is called with the blocks of a cell.
  constructor(name, onPick) {
    this.name = name;
    this.onPick = onPick;
    this.pool = null;
    this.marked = new Set();
    this.cursor = -1;
    this.element = document.createElement("div");
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "map of blocks");
    this.pointed = document.createElement("p");
    this.pointed.className = "pointed";
    this.pointed.setAttribute("role", "status");
    this.element.append(this.canvas, this.pointed);
    this.canvas.addEventListener("mousemove", (event) => this.point(this.cellAt(event)));
    this.canvas.addEventListener("mouseleave", () => this.point(-1));
    this.canvas.addEventListener("blur", () => this.point(-1));
    this.canvas.addEventListener("click", (event) => this.pick(this.cellAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(pool) {
    this.pool = pool;
    const label =
      `Pool of ${this.name}: ${count(pool.used)} of ${count(pool.total)} blocks used, ${count(pool.cached)} cached, ${count(pool.free)} free. ` +
      "Arrow keys move, Enter shows a block.";
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
    this.draw();
    this.say();
  }

  mark(blocks) {
    this.marked = new Set(blocks);
    this.draw();
  }

  get cells() {
    return this.pool ? this.pool.cell_used.length : 0;
  }

  layout() {
    const width = this.element.clientWidth;
    const fitting = Math.floor(Math.sqrt((width * HEIGHT) / Math.max(1, this.cells))) - GAP;
    const size = Math.min(LARGEST, Math.max(SMALLEST, fitting));
    const columns = Math.max(1, Math.floor((width + GAP) / (size + GAP)));
    return { width, size, columns, rows: Math.ceil(this.cells / columns) };
  }

  draw() {
    const { width, size, columns, rows } = this.layout();
    if (!this.cells || !width) return;
    const ratio = devicePixelRatio || 1;
    const height = rows * (size + GAP) - GAP + 2;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.translate(1, 1);
    const paint = Object.fromEntries(
      ["free", "cached", "used", "shared", "shared-text", "marked", "accent"].map((name) => [name, colour(name)]),
    );
    const marks = new Set([...this.marked].map((block) => Math.floor(block / this.pool.scale)));
    Object.assign(this.canvas.dataset, { pitch: size + GAP, columns, marked: marks.size });
    context.font = `600 ${Math.round(size * 0.6)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let cell = 0; cell < this.cells; cell += 1) {
      const x = (cell % columns) * (size + GAP);
      const y = Math.floor(cell / columns) * (size + GAP);
      this.drawCell(context, paint, cell, x, y, size);
      if (marks.has(cell) || cell === this.cursor) {
        context.lineWidth = 2;
        context.strokeStyle = marks.has(cell) ? paint.marked : paint.accent;
        context.strokeRect(x, y, size, size);
      }
    }
  }

  // Fills a cell from the bottom: shared, used by one sequence, cached. The rest is free.
  drawCell(context, paint, cell, x, y, size) {
    const { cell_used: used, cell_shared: shared, cell_cached: cached, cell_holders: holders } = this.pool;
    const blocks = this.blocksOf(cell).count;
    context.fillStyle = paint.free;
    context.fillRect(x, y, size, size);
    let bottom = y + size;
    for (const [name, number] of [["shared", shared[cell]], ["used", used[cell] - shared[cell]], ["cached", cached[cell]]]) {
      const height = (size * number) / blocks;
      context.fillStyle = paint[name];
      context.fillRect(x, bottom - height, size, height);
      bottom -= height;
    }
    if (blocks === 1 && holders[cell] > 1 && size > 10) {
      context.fillStyle = paint["shared-text"];
      context.fillText(holders[cell] > 99 ? "+" : holders[cell], x + size / 2, y + size / 2 + 0.5);
    }
  }

  blocksOf(cell) {
    const first = cell * this.pool.scale;
    return { first, count: Math.min(this.pool.scale, this.pool.total - first) };
  }

  cellAt(event) {
    const { size, columns } = this.layout();
    const column = Math.floor(event.offsetX / (size + GAP));
    const cell = Math.floor(event.offsetY / (size + GAP)) * columns + column;
    return column < columns && cell < this.cells ? cell : -1;
  }

  point(cell) {
    if (cell === this.cursor) return;
    this.cursor = cell;
    this.draw();
    this.say();
  }

  say() {
    const text = this.cursor < 0 || this.cursor >= this.cells ? "" : this.words(this.cursor);
    if (this.pointed.textContent !== text) this.pointed.textContent = text;
  }

  words(cell) {
    const { first, count: blocks } = this.blocksOf(cell);
    const used = this.pool.cell_used[cell];
    const holders = this.pool.cell_holders[cell];
    if (blocks === 1) {
      const by = holders === 1 ? "one sequence" : `${count(holders)} sequences`;
      return `block ${first}: ${used ? `used by ${by}` : this.pool.cell_cached[cell] ? "cached prefix" : "free"}`;
    }
    const free = blocks - used - this.pool.cell_cached[cell];
    return (
      `blocks ${first} to ${first + blocks - 1}: ${count(used)} used (${count(this.pool.cell_shared[cell])} shared, ` +
      `by ${count(holders)} at most), ${count(this.pool.cell_cached[cell])} cached, ${count(free)} free`
    );
  }

  pick(cell) {
    if (cell < 0 || !this.pool) return;
    const { first, count: blocks } = this.blocksOf(cell);
    this.onPick(first, blocks);
  }

  key(event) {
    const { columns } = this.layout();
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    if (event.key in steps) {
      const target = Math.max(0, this.cursor) + (this.cursor < 0 ? 0 : steps[event.key]);
      this.point(Math.min(this.cells - 1, Math.max(0, target)));
    } else if (event.key === "Enter" || event.key === " ") this.pick(this.cursor);
    else return;
    event.preventDefault();
  }
}
