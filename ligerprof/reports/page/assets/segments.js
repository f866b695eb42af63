// The segments of a moment: what is free in each, and which blocks keep it from being released.
"use strict";
(() => {
  const { element, formatBytes, formatShare, number } = ligerprof;
  const FIRST = 12;
  const HEIGHT = 22;
  const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ORDERS = {
    free: ["most free bytes", (a, b) => b.free - a.free || b.size - a.size],
    largest: ["largest free piece", (a, b) => b.largest - a.largest],
    size: ["size", (a, b) => b.size - a.size],
    address: ["address", (a, b) => (a.address.length - b.address.length) || (a.address < b.address ? -1 : 1)],
  };

  class Segments {
    constructor(host, recording) {
      Object.assign(this, { host, recording, order: "free", shown: FIRST, drawn: [] });
      this.choice = element("select", { "aria-label": "Order of segments", onchange: () => this.change({ order: this.choice.value }) });
      for (const [value, [text]] of Object.entries(ORDERS)) this.choice.append(element("option", { value }, text));
      this.summary = element("p", {});
      this.list = element("div", { class: "segments" });
      this.more = element("button", { type: "button", class: "more", onclick: () => this.change({ shown: this.shown + 40 }) }, "Show more segments");
      this.tip = element("div", { class: "tip", hidden: true });
      this.bar = element("div", { class: "bar" }, element("label", {}, "First those with ", this.choice));
      this.host.classList.add("segments-part");
      this.host.append(this.summary, this.bar, this.list, this.more, this.tip);
      new ResizeObserver(() => this.recolor()).observe(this.list);
    }

    change(changes) {
      Object.assign(this, changes);
      this.draw();
    }

    show(moment) {
      this.moment = moment;
      this.shown = FIRST;
      this.draw();
    }

    draw() {
      this.drawn = [];
      const state = this.recording.segmentsAt(this.moment);
      const marked = this.recording.segments.includes(state);
      const all = state.segments;
      const total = (key) => all.reduce((sum, one) => sum + one[key], 0);
      const reserved = total("size") + state.rest.bytes, free = total("free") + state.rest.free;
      const largest = Math.max(0, ...all.map((one) => one.largest));
      const pieces = all.reduce((sum, one) => sum + one.pieces.filter((piece) => piece.kind === "free").length, 0);
      const { failure } = this.recording.marks;
      const wanted = failure && failure.moment === state.moment ? ` The failed allocation requested ${formatBytes(failure.requested)}.` : "";
      this.summary.textContent = `${formatBytes(reserved)} reserved in ${number.format(all.length + state.rest.count)} segments, ${formatBytes(free)} (${formatShare(free, reserved)}) of it free, in ${number.format(pieces)} pieces of at most ${formatBytes(largest)}.${wanted}${marked || !this.recording.leastBytes ? "" : ` Blocks under ${formatBytes(this.recording.leastBytes)} are not listed and counted as free here.`}`;
      const sorted = [...all].sort(ORDERS[this.order][1]);
      this.list.replaceChildren(...sorted.slice(0, this.shown).map((segment) => this.row(segment)));
      const hidden = sorted.slice(this.shown);
      this.more.hidden = !hidden.length;
      const rest = hidden.length + state.rest.count;
      if (rest) {
        const bytes = hidden.reduce((sum, one) => sum + one.size, state.rest.bytes), left = hidden.reduce((sum, one) => sum + one.free, state.rest.free);
        this.list.append(element("p", { class: "caption" }, `${number.format(rest)} more segments: ${formatBytes(bytes)}, ${formatBytes(left)} free.`));
      }
      this.recolor();
    }

    // bytes by role of the blocks in a segment, the largest first
    pins(segment) {
      const { recording } = this;
      const roles = new Map();
      for (const piece of segment.pieces) {
        if (piece.kind === "free") continue;
        const name = piece.block < 0 ? piece.kind : recording.roleNames[recording.blocks.role[piece.block]];
        roles.set(name, (roles.get(name) || 0) + piece.size);
      }
      return [...roles].sort((a, b) => b[1] - a[1]);
    }

    row(segment) {
      const pins = this.pins(segment);
      const blocks = segment.pieces.filter((piece) => piece.kind !== "free").length;
      const kinds = [segment.small ? "small blocks" : "", segment.stream ? `stream ${segment.stream}` : "", segment.pool && segment.pool.some(Boolean) ? `private pool ${segment.pool.join(".")}` : ""].filter(Boolean);
      const held = pins.length ? `held by ${pins.slice(0, 3).map(([role, bytes]) => `${role} ${formatBytes(bytes)}`).join(", ")}${pins.length > 3 ? " …" : ""} (${number.format(blocks)} ${blocks === 1 ? "block" : "blocks"})` : "empty: it can be released";
      const canvas = element("canvas", { height: String(HEIGHT), role: "img", "aria-label": `Pieces of segment ${segment.address}` });
      const details = element("div", { class: "pieces", hidden: true });
      const open = element("button", { type: "button", class: "open", "aria-expanded": "false" }, `${formatBytes(segment.size)}, ${formatBytes(segment.free)} free`);
      open.addEventListener("click", () => {
        details.hidden = !details.hidden;
        open.setAttribute("aria-expanded", String(!details.hidden));
        if (!details.childElementCount) details.append(this.pieces(segment));
      });
      canvas.addEventListener("pointermove", (event) => this.point(event, segment, canvas));
      canvas.addEventListener("pointerdown", (event) => this.point(event, segment, canvas));
      canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
      this.drawn.push([segment, canvas]);
      return element("div", { class: "segment" }, element("div", {}, open, element("span", { class: "muted" }, ` ${[held, ...kinds].join("; ")}`)), canvas, details);
    }

    pieceText(piece) {
      const { recording } = this;
      if (piece.block < 0) return `${formatBytes(piece.size)} ${piece.kind}`;
      const site = recording.sites[recording.blocks.site[piece.block]];
      const who = [site.module, site.frame || site.node].filter(Boolean).join(", ");
      return `${formatBytes(piece.size)} ${recording.roleNames[recording.blocks.role[piece.block]]}: ${who || "no stack recorded"}; ${ligerprof.reasons(recording, piece.block).join("; ")}`;
    }

    // the pieces in the order of addresses, as text
    pieces(segment) {
      const most = 300;
      const list = element("ol", { class: "stack" }, ...segment.pieces.slice(0, most).map((piece) => element("li", {}, this.pieceText(piece))));
      const rest = segment.pieces.length - most;
      return element("div", {}, element("p", { class: "muted" }, `Address ${segment.address}, by address:`), list, rest > 0 ? element("p", { class: "muted" }, `${number.format(rest)} more pieces.`) : null);
    }

    point(event, segment, canvas) {
      const box = canvas.getBoundingClientRect();
      const place = ((event.clientX - box.left) / box.width) * segment.size;
      let end = 0;
      const piece = segment.pieces.find((one) => (end += one.size) >= place) || segment.pieces[segment.pieces.length - 1];
      this.tip.textContent = this.pieceText(piece);
      this.tip.hidden = false;
      const host = this.host.getBoundingClientRect();
      this.tip.style.left = `${Math.max(2, Math.min(host.width - this.tip.offsetWidth - 2, event.clientX - host.left + 12))}px`;
      this.tip.style.top = `${box.bottom - host.top + 4}px`;
    }

    recolor() {
      const ratio = devicePixelRatio || 1;
      for (const [segment, canvas] of this.drawn) {
        const width = canvas.clientWidth;
        if (!width) continue;
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(HEIGHT * ratio);
        const pen = canvas.getContext("2d");
        const scale = canvas.width / segment.size;
        let at = 0;
        for (const piece of segment.pieces) {
          const start = Math.round(at * scale), stop = Math.round((at += piece.size) * scale);
          if (piece.kind === "free") continue;
          const role = piece.block < 0 ? "" : this.recording.roleNames[this.recording.blocks.role[piece.block]];
          pen.fillStyle = role ? styleOf(`--role-${role}`) : styleOf("--mixed");
          // a block is at least one pixel wide, so that what pins a segment can be seen
          pen.fillRect(start, 0, Math.max(1, stop - start), canvas.height);
          if (stop - start > 4) {
            pen.fillStyle = role ? styleOf(`--edge-${role}`) : styleOf("--control");
            pen.fillRect(stop - 1, 0, 1, canvas.height);
          }
        }
      }
    }
  }

  ligerprof.Segments = Segments;
})();
