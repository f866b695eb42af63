// A flame graph of the memory at a moment, by stack or by module, drawn by d3-flame-graph.
"use strict";
(() => {
  const { element, formatBytes, formatShare } = ligerprof;
  const CELL = 20;
  // calls that only forward to others
  const LIBRARY = /^(?:torch|accelerate|deepspeed|transformers\/utils)\/|(?:^|\/)(?:contextlib|functools|threading|runpy)\.py$|^</;

  // the file without its folders; the whole path is in the label
  const shortFrame = (text) => text.replace(/^.*\/(?=[^/]*$)/, "");

  // what the frames of the graph are called, outermost first
  const pathOf = (recording, block, by, all) => {
    const site = recording.sites[recording.blocks.site[block]];
    if (by === "module") return site.module ? site.module.split(".") : [site.node || site.frame || "no module recorded"];
    const frames = [...recording.stacks[site.stack]].reverse();
    const kept = all ? frames : frames.filter((frame) => !LIBRARY.test(recording.frames[frame][0]));
    const names = (kept.length ? kept : frames.slice(-1)).map((frame) => recording.frameText(frame));
    if (site.node && !names.length) names.push(site.node);
    return names.length ? names : ["no stack recorded"];
  };

  // The tree of a moment; what is not listed block by block is in it, so that it adds up to the allocated bytes.
  const flameTree = (recording, column, by, all = false, blocks = null) => {
    const root = { name: "allocated", full: "allocated", value: 0, children: new Map(), roles: new Map() };
    const add = (path, role, bytes) => {
      let node = root;
      for (const name of [null, ...path, role]) {
        if (name !== null) {
          const leaf = name === role && node.depth === path.length;
          const key = leaf ? `\n${name}` : name;
          if (!node.children.has(key)) node.children.set(key, { name: by === "stack" ? shortFrame(name) : name, full: name, value: 0, children: new Map(), roles: new Map(), depth: (node.depth || 0) + 1, role: leaf ? role : "" });
          node = node.children.get(key);
        } else node.depth = 0;
        node.value += bytes;
        node.roles.set(role, (node.roles.get(role) || 0) + bytes);
      }
    };
    // of a range of time, only listed blocks
    const left = blocks ? new Map() : recording.bytesAt(column);
    for (const block of blocks || recording.liveAt(recording.moments[column])) {
      const role = recording.roleNames[recording.blocks.role[block]];
      add(pathOf(recording, block, by, all), role, recording.blocks.bytes[block]);
      if (!blocks) left.set(role, left.get(role) - recording.blocks.bytes[block]);
    }
    for (const [role, bytes] of left) {
      if (bytes > 0) add([role === "allocator_rounding" ? "allocator rounding" : "smaller blocks"], role, bytes);
    }
    const plain = (node) => ({ name: node.name, full: node.full, value: node.value, role: node.role, roles: node.roles, children: [...node.children.values()].sort((a, b) => b.value - a.value).map(plain) });
    return plain(root);
  };

  class Flame {
    constructor(host, recording) {
      Object.assign(this, { host, recording, by: recording.sites.some((site) => site.module) ? "module" : "stack", all: false });
      this.choice = element("select", { "aria-label": "Flame graph by", onchange: () => this.change({ by: this.choice.value }) }, element("option", { value: "stack" }, "stack"), element("option", { value: "module" }, "module"));
      this.choice.value = this.by;
      this.allBox = element("input", { type: "checkbox", onchange: () => this.change({ all: this.allBox.checked }) });
      this.search = element("input", { type: "search", placeholder: "frame or module", "aria-label": "Search the flame graph" });
      this.search.addEventListener("input", () => this.highlight());
      const reset = element("button", { type: "button", onclick: () => this.reset() }, "Reset zoom");
      this.allLabel = element("label", {}, this.allBox, " library frames");
      this.details = element("p", { class: "caption", "aria-live": "polite" }, "");
      this.chart = element("div", { class: "flame" });
      this.host.append(element("div", { class: "bar" }, element("label", {}, "By ", this.choice), this.allLabel, element("label", {}, "Search ", this.search), reset), this.details, this.chart);
      this.chart.addEventListener("focusin", (event) => this.describe(event.target.__data__));
      this.chart.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.width !== this.chart.clientWidth && this.column !== undefined && this.draw()).observe(this.chart);
    }

    change(changes) {
      Object.assign(this, changes);
      this.draw();
    }
    show(moment, role, scope) {
      this.column = this.recording.columnOf(moment);
      this.blocks = scope.name === "live" ? null : scope.blocks;
      this.draw();
    }

    draw() {
      this.width = this.chart.clientWidth;
      if (!this.width) return;
      this.allLabel.hidden = this.by !== "stack";
      const tree = flameTree(this.recording, this.column, this.by, this.all, this.blocks);
      this.total = tree.value;
      this.chart.replaceChildren();
      this.graph = flamegraph
        .default()
        .width(this.width)
        .cellHeight(CELL)
        .inverted(true)
        .transitionDuration(0)
        .minFrameSize(this.width < 500 ? 3 : 2)
        .sort((a, b) => b.value - a.value)
        .setColorMapper((node) => this.color(node))
        .setLabelHandler((node) => this.label(node))
        .setSearchMatch((node, term) => Boolean(term) && node.data.full.toLowerCase().includes(term.toLowerCase()))
        .setSearchHandler(() => {})
        .setDetailsHandler((text) => (this.details.textContent = text || this.hint()))
        .onClick((node) => {
          this.describe(node);
          this.decorate();
        });
      d3.select(this.chart).datum(tree).call(this.graph);
      // the library leaves room for a title
      const deepest = Math.max(...[...this.chart.querySelectorAll("g.frame")].map((frame) => frame.__data__.depth));
      this.chart.querySelector("svg").setAttribute("height", (deepest + 1) * CELL);
      this.details.textContent = this.hint();
      this.highlight();
    }

    hint() {
      return "Width is bytes. Click, tap or press Enter on a frame to zoom to it; colors are those of the roles.";
    }
    // one role has its color; a mixture is neutral
    color(node) {
      if (node.highlight) return "var(--accent)";
      const roles = node.data.roles;
      return roles.size === 1 ? `var(--role-${[...roles.keys()][0]})` : "var(--mixed)";
    }
    label(node) {
      const roles = [...node.data.roles].sort((a, b) => b[1] - a[1]);
      const held = roles.length === 1 && node.data.role ? "" : `: ${roles.slice(0, 4).map(([role, bytes]) => `${role} ${formatBytes(bytes)}`).join(", ")}`;
      return `${node.data.full}, ${formatBytes(node.data.value)} (${formatShare(node.data.value, this.total)})${held}`;
    }
    describe(node) {
      if (node && node.data) this.details.textContent = this.label(node);
    }
    highlight() {
      const term = this.search.value.trim();
      if (term) this.graph.search(term);
      else this.graph.clear();
      this.decorate();
    }
    reset() {
      this.search.value = "";
      this.graph.resetZoom();
      this.graph.clear();
      this.decorate();
    }
    // frames can be reached by Tab and the arrows, and read by a screen reader
    decorate() {
      const frames = [...this.chart.querySelectorAll("g.frame")];
      frames.forEach((frame, index) => {
        const node = frame.__data__;
        frame.setAttribute("tabindex", index ? "-1" : "0");
        frame.setAttribute("role", "button");
        frame.setAttribute("aria-label", this.label(node));
        const roles = node.data.roles;
        frame.style.setProperty("--label", node.highlight ? "var(--accent-ink)" : roles.size === 1 ? `var(--ink-${[...roles.keys()][0]})` : "var(--mixed-ink)");
      });
      const svg = this.chart.querySelector("svg");
      if (svg) svg.setAttribute("aria-label", `Flame graph of ${formatBytes(this.total)} by ${this.by}`);
    }
    key(event) {
      const frame = event.target.closest("g.frame");
      if (!frame) return;
      const node = frame.__data__;
      const siblings = node.parent ? node.parent.children : [node];
      const targets = {
        ArrowDown: node.children && node.children[0],
        ArrowUp: node.parent,
        ArrowRight: siblings[siblings.indexOf(node) + 1],
        ArrowLeft: siblings[siblings.indexOf(node) - 1],
      };
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        frame.dispatchEvent(new MouseEvent("click", { bubbles: true }));
      } else if (event.key in targets) {
        event.preventDefault();
        const next = [...this.chart.querySelectorAll("g.frame")].find((one) => one.__data__ === targets[event.key]);
        if (next) next.focus();
      }
    }
  }

  Object.assign(ligerprof, { Flame, flameTree });
})();
