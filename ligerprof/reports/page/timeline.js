// Draws bytes by role over a recording on a canvas, with zoom and hover. Names come from a hostile file: text only.
"use strict";
(() => {
  const started = performance.now();
  const root = document.getElementById("timeline");
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const canvas = root.querySelector("canvas");
  const tip = root.querySelector(".tip");
  const range = root.querySelector(".range");
  const pen = canvas.getContext("2d");

  // columns are stored as differences from one value to the next
  const running = (steps) => {
    const sums = new Float64Array(steps.length);
    for (let i = 0, sum = 0; i < steps.length; i++) sums[i] = sum += steps[i];
    return sums;
  };
  const starts = running(data.starts);
  const moments = running(data.moments);
  const reserved = running(data.reserved);
  const roles = data.roles.map((role) => ({ ...role, bytes: running(role.bytes), hidden: false }));
  const count = starts.length;
  const last = data.last_moment + 1;
  const peakBytes = roles.reduce((sum, role) => sum + role.bytes[data.peak_column], 0);
  const smallest = Math.min(20, last);
  let view = [0, last];
  let hover = null;

  const size = (bytes) => {
    const magnitude = Math.abs(bytes);
    if (magnitude >= 10 * 2 ** 30) return (bytes / 2 ** 30).toFixed(2) + " GiB";
    if (magnitude >= 2 ** 20) return (bytes / 2 ** 20).toFixed(1) + " MiB";
    return magnitude >= 10 * 2 ** 10 ? (bytes / 2 ** 10).toFixed(1) + " KiB" : bytes + " B";
  };
  // the last index whose value is at most x
  const at = (values, x) => {
    let low = 0, high = values.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] <= x) low = middle; else high = middle;
    }
    return low;
  };
  const shown = (column) => roles.reduce((sum, role) => sum + (role.hidden ? 0 : role.bytes[column]), 0);
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  const frame = () => {
    const box = canvas.getBoundingClientRect();
    return { left: 4, top: 26, right: box.width - 4, bottom: box.height - 20, width: box.width, height: box.height };
  };
  const toX = (moment, area) => area.left + ((moment - view[0]) / (view[1] - view[0])) * (area.right - area.left);
  const toMoment = (x, area) => view[0] + ((x - area.left) / (area.right - area.left)) * (view[1] - view[0]);

  // one column per pixel: the highest of those that share it
  const pixels = (area) => {
    const found = [];
    for (let x = Math.ceil(area.left); x < area.right; x++) {
      const from = at(starts, toMoment(x, area)), to = Math.max(from, at(starts, toMoment(x + 1, area) - 1e-9));
      let best = from;
      for (let column = from + 1; column <= to; column++) if (shown(column) > shown(best)) best = column;
      found.push([x, best]);
    }
    return found;
  };

  let layout = { area: null, top: 1 };
  const draw = () => {
    const area = frame(), ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(area.width * ratio);
    canvas.height = Math.round(area.height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const columns = pixels(area);
    let top = 1;
    for (const [, column] of columns) top = Math.max(top, shown(column), reserved[column]);
    layout = { area, top: top * 1.02 };
    const toY = (bytes) => area.bottom - (bytes / layout.top) * (area.bottom - area.top);
    for (const [x, column] of columns) {
      let below = 0;
      for (const role of roles) {
        if (role.hidden || !role.bytes[column]) continue;
        const y = toY(below + role.bytes[column]);
        pen.fillStyle = role.color;
        pen.fillRect(x, y, 1, toY(below) - y);
        below += role.bytes[column];
      }
    }
    drawReserved(columns, toY);
    drawScale(area, toY);
    drawPeak(area, toY);
    if (hover !== null) drawLine(toX(hover, area), area, color("--ink"), [2, 2]);
    range.textContent = `moments ${Math.round(view[0])} to ${Math.round(view[1]) - 1} of ${last - 1}`;
  };
  const drawReserved = (columns, toY) => {
    pen.beginPath();
    for (const [x, column] of columns) pen.lineTo(x + 0.5, toY(reserved[column]));
    pen.strokeStyle = color("--ink");
    pen.lineWidth = 1.2;
    pen.setLineDash([]);
    pen.stroke();
  };
  const drawLine = (x, area, style, dash) => {
    pen.beginPath();
    pen.moveTo(x, area.top);
    pen.lineTo(x, area.bottom);
    pen.strokeStyle = style;
    pen.lineWidth = 1;
    pen.setLineDash(dash);
    pen.stroke();
    pen.setLineDash([]);
  };
  const label = (text, x, y) => {
    const width = pen.measureText(text).width;
    pen.fillStyle = color("--paper");
    pen.globalAlpha = 0.8;
    pen.fillRect(x - 2, y - 10, width + 4, 13);
    pen.globalAlpha = 1;
    pen.fillStyle = color("--ink");
    pen.fillText(text, x, y);
  };
  const drawScale = (area, toY) => {
    pen.font = "11px system-ui, sans-serif";
    // 1, 2, 5, 10, … in the unit of the labels
    const [unit, name] = layout.top >= 2 * 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
    let step = unit / 100;
    for (let turn = 0; layout.top / step > 5; turn++) step *= turn % 3 === 1 ? 2.5 : 2;
    for (let bytes = step; bytes < layout.top; bytes += step) {
      pen.fillStyle = color("--rule");
      pen.globalAlpha = 0.6;
      pen.fillRect(area.left, toY(bytes), area.right - area.left, 1);
      pen.globalAlpha = 1;
      label(`${+(bytes / unit).toFixed(2)} ${name}`, area.left + 2, toY(bytes) - 2);
    }
    pen.fillStyle = color("--rule");
    pen.fillRect(area.left, area.bottom, area.right - area.left, 1);
    pen.fillStyle = color("--ink");
    pen.fillText("allocator events, oldest first", area.left + 2, area.bottom + 15);
  };
  const drawPeak = (area, toY) => {
    const moment = moments[data.peak_column];
    if (moment < view[0] || moment > view[1]) return;
    const x = toX(moment + 0.5, area);
    drawLine(x, area, color("--peak"), [5, 3]);
    const y = toY(shown(data.peak_column));
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(x - 5, y - 8);
    pen.lineTo(x + 5, y - 8);
    pen.fillStyle = color("--peak");
    pen.fill();
    const text = "peak " + size(peakBytes);
    pen.font = "600 12px system-ui, sans-serif";
    pen.fillText(text, Math.max(area.left, Math.min(x - 20, area.right - pen.measureText(text).width)), area.top - 12);
    pen.font = "11px system-ui, sans-serif";
  };

  let waiting = false;
  const redraw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  };
  const look = (from, to) => {
    const width = Math.min(last, Math.max(smallest, to - from));
    const begin = Math.min(Math.max(0, (from + to - width) / 2), last - width);
    view = [begin, begin + width];
    redraw();
  };
  const zoom = (factor, around) =>
    look(around - (around - view[0]) * factor, around + (view[1] - around) * factor);
  const middle = () => (view[0] + view[1]) / 2;
  const toPeak = () => {
    const moment = moments[data.peak_column], half = Math.max(smallest, last / 40);
    look(moment - half, moment + half);
  };

  const line = (name, text, style) => {
    const element = document.createElement("div");
    element.className = name;
    element.textContent = text;
    if (style) element.style.borderLeftColor = style;
    tip.append(element);
  };
  const holding = (role, column) => {
    const list = role.holdings, index = at(list.map((entry) => entry[0]), column);
    return list.length && list[index][0] <= column ? list[index].slice(1) : [];
  };
  const describe = (column, role) => {
    tip.replaceChildren();
    const [step, phase, place] = data.running[data.ran[column]];
    line("head", `${size(shown(column))} allocated, ${size(reserved[column])} reserved`);
    const when = [step ? `step ${step}` : "", phase, place].filter(Boolean).join(", ");
    line("when", `moment ${moments[column]}` + (when ? `: ${when}` : ""));
    const ordered = role ? [role]
      : roles.filter((each) => !each.hidden).sort((a, b) => b.bytes[column] - a.bytes[column]).slice(0, 4);
    for (const each of ordered) {
      if (!each.bytes[column]) continue;
      line("role", `${each.name} ${size(each.bytes[column])}`, each.color);
      for (const [holder, bytes, blocks] of holding(each, column)) {
        const [module, place] = data.holders[holder];
        line("who", `${size(bytes)} in ${blocks} × ${[module, place].filter(Boolean).join(" · ") || "unknown"}`);
      }
    }
  };
  const point = (event) => {
    const area = frame(), box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    hover = Math.min(last - 1, Math.max(0, toMoment(x, area)));
    const from = at(starts, hover), to = Math.max(from, at(starts, toMoment(x + 1, area) - 1e-9));
    let column = from;
    for (let next = from + 1; next <= to; next++) if (shown(next) > shown(column)) column = next;
    let level = ((area.bottom - y) / (area.bottom - area.top)) * layout.top, under = null;
    for (const role of roles) {
      if (role.hidden || under) continue;
      if (level >= 0 && level < role.bytes[column]) under = role;
      level -= role.bytes[column];
    }
    describe(column, under);
    tip.hidden = false;
    const room = root.clientWidth - tip.offsetWidth - 8;
    tip.style.left = Math.max(0, Math.min(x + 14, x + 14 > room ? x - tip.offsetWidth - 14 : room)) + "px";
    tip.style.top = canvas.offsetTop + Math.min(y + 14, area.bottom) + "px";
    redraw();
  };
  const leave = () => { hover = null; tip.hidden = true; redraw(); };

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, view };
    canvas.setPointerCapture(event.pointerId);
    point(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag && Math.abs(event.clientX - drag.x) > 3) {
      const area = frame(), by = ((event.clientX - drag.x) / (area.right - area.left)) * (drag.view[1] - drag.view[0]);
      look(drag.view[0] - by, drag.view[1] - by);
    }
    point(event);
  });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointercancel", () => { drag = null; leave(); });
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("dblclick", () => look(0, last));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, toMoment(event.clientX - box.left, frame()));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const step = (view[1] - view[0]) / 10;
    const keys = {
      ArrowLeft: () => look(view[0] - step, view[1] - step), ArrowRight: () => look(view[0] + step, view[1] + step),
      "+": () => zoom(0.5, middle()), "-": () => zoom(2, middle()), "0": () => look(0, last), p: toPeak,
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  const buttons = { in: () => zoom(0.5, middle()), out: () => zoom(2, middle()), peak: toPeak, all: () => look(0, last) };
  for (const [name, act] of Object.entries(buttons))
    root.querySelector(`[data-act=${name}]`).addEventListener("click", act);
  for (const button of root.querySelectorAll("[data-role]")) {
    button.addEventListener("click", () => {
      const role = roles.find((each) => each.name === button.dataset.role);
      role.hidden = !role.hidden;
      button.setAttribute("aria-pressed", String(!role.hidden));
      redraw();
    });
  }
  new ResizeObserver(redraw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  draw();
  root.dataset.drawnMs = (performance.now() - started).toFixed(0);
})();
