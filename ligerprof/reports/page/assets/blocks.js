// The table of the blocks that are live at a moment: grouped, searched, filtered, sorted, each with its stack.
"use strict";
(() => {
  const { element, csvButton, formatBytes, formatMib, formatShare, number } = ligerprof;
  const FIRST_ROWS = 50;
  const GROUPINGS = {
    place: "call site, all layers",
    site: "call site, each layer",
    block: "each block",
    module: "module",
    layer: "layer",
    role: "role",
    phase: "phase",
    operation: "operation",
    kept: "what keeps it",
  };

  const withoutIndices = (module) => module.split(".").map((part) => (/^\d+$/.test(part) ? "*" : part)).join(".");
  const phaseOf = (recording, block) => recording.phaseNames[recording.blocks.phase[block]] || "";

  // What a block is grouped under: [key, text, secondary text].
  const placeOf = (recording, block, by) => {
    const site = recording.sites[recording.blocks.site[block]];
    const role = recording.roleNames[recording.blocks.role[block]];
    if (by === "role") return [role, "", ""];
    if (by === "phase") return [phaseOf(recording, block) || "unknown", phaseOf(recording, block) || "unknown phase", ""];
    if (by === "layer") {
      const layer = recording.blocks.layer[block];
      return [String(layer), layer < 0 ? "outside layers, or not known" : `layer ${layer}`, ""];
    }
    if (by === "operation") return [site.operation, site.operation || "not known", ""];
    if (by === "kept") {
      const kept = withoutIndices(recording.keptText(block));
      return [kept, kept || "not recorded", ""];
    }
    if (by === "module") return [site.module, site.module || "no module recorded", ""];
    const module = by === "place" ? withoutIndices(site.module) : site.module;
    const frame = site.frame || site.node;
    const text = module || frame || "no stack recorded";
    const more = module ? frame : "";
    const key = by === "block" ? String(block) : `${role}\n${module}\n${frame}`;
    return [key, text, more];
  };

  // Group blocks, the largest group first; each has its bytes and its blocks, the largest first.
  const groupBlocks = (recording, blocks, by) => {
    const groups = new Map();
    for (const block of blocks) {
      const [key, text, more] = placeOf(recording, block, by);
      let group = groups.get(key);
      if (!group) groups.set(key, (group = { key, text, more, who: [text, more].filter(Boolean).join(", "), bytes: 0, blocks: [], roles: new Set() }));
      group.bytes += recording.blocks.bytes[block];
      group.blocks.push(block);
      group.roles.add(recording.roleNames[recording.blocks.role[block]]);
    }
    const sizes = recording.blocks.bytes;
    for (const group of groups.values()) group.blocks.sort((a, b) => sizes[b] - sizes[a]);
    return [...groups.values()].sort((a, b) => b.bytes - a.bytes);
  };

  // Why a block is there: when it was allocated, how long it lives, and what keeps it.
  const reasons = (recording, block) => {
    const step = recording.blocks.step[block], phase = phaseOf(recording, block);
    const when = [step > 0 ? `step ${step}` : "", phase].filter(Boolean).join(", ");
    const { operation } = recording.sites[recording.blocks.site[block]];
    return [recording.keptText(block), (when || operation) && `allocated${when ? ` in ${when}` : ""}${operation ? ` by ${operation}` : ""}`, `lives ${recording.lifeText(block)}`].filter(Boolean);
  };

  const keptShort = (recording, block) => {
    const kept = recording.keptText(block).replace(/^kept (?:for backward )?/, "");
    return kept ? element("span", { class: "kept" }, kept + "; ") : null;
  };

  const swatch = (role) => {
    const made = element("i", { class: "swatch" });
    made.style.setProperty("--fill", `var(--role-${role})`);
    made.style.setProperty("--edge", `var(--edge-${role})`);
    return made;
  };

  class Blocks {
    constructor(host, recording) {
      Object.assign(this, { host, recording, by: "place", role: "", query: "", sort: "bytes", down: true, rows: FIRST_ROWS, open: new Set() });
      this.texts = new Map();
      this.build();
    }

    build() {
      const select = (label, entries, act) => {
        const made = element("select", { "aria-label": label, onchange: (event) => act(event.target.value) });
        for (const [value, text] of entries) made.append(element("option", { value }, text));
        return element("label", {}, `${label} `, made);
      };
      const { roles } = this.recording;
      this.search = element("input", { type: "search", placeholder: "module, file, operation …", "aria-label": "Search blocks" });
      this.search.addEventListener("input", () => this.change({ query: this.search.value.trim().toLowerCase() }));
      this.roleSelect = select("Role", [["", "all roles"], ...roles.map((role) => [role.name, role.name])], (role) => this.change({ role }));
      this.found = element("p", { class: "caption", "aria-live": "polite" });
      this.body = element("tbody");
      this.foot = element("tfoot");
      this.heads = element("tr");
      this.more = element("button", { type: "button", class: "more", onclick: () => this.change({ rows: this.rows + 4 * FIRST_ROWS }, true) }, "Show more rows");
      this.host.append(
        element("div", { class: "bar" }, element("label", {}, "Search ", this.search), select("Group by", Object.entries(GROUPINGS), (by) => this.change({ by })), this.roleSelect, csvButton("blocks.csv", () => this.csv())),
        this.found,
        element("table", { class: "blocks" }, element("thead", {}, this.heads), this.body, this.foot),
        this.more,
      );
      for (const [name, text] of [["role", "role"], ["bytes", "size"], ["count", "blocks"], ["text", "allocated by"], ["life", "kept by, lifetime"]]) {
        const button = element("button", { type: "button", onclick: () => this.change({ sort: name, down: this.sort === name ? !this.down : name !== "role" && name !== "text" }) }, text);
        this.heads.append(element("th", { scope: "col", class: `c-${name}`, "data-sort": name }, button));
      }
    }

    change(changes, keepRows = false) {
      Object.assign(this, changes);
      if (!keepRows) this.rows = FIRST_ROWS;
      this.draw();
    }

    // Show the blocks of a scope: those that are live at a moment which the timeline shows, or of a range.
    show(moment, role, scope) {
      this.column = this.recording.columnOf(moment);
      this.scope = scope.name;
      this.live = scope.blocks;
      if (role !== null) {
        this.role = role;
        this.roleSelect.querySelector("select").value = role;
      }
      this.change({});
    }

    // every block that the table shows, one per row
    csv() {
      const { recording } = this, { bytes, role, step, from, events, site } = recording.blocks;
      const rows = this.matching().map((block) => {
        const { module, frame, node, operation } = recording.sites[site[block]];
        return [recording.roleNames[role[block]], bytes[block], module, frame || node, operation, phaseOf(recording, block), step[block], from[block], events[block] < 0 ? "" : from[block] + events[block], recording.keptText(block)];
      });
      return [["role", "bytes", "module", "allocated by", "operation", "phase", "step", "allocated at event", "freed at event", "kept by"], ...rows];
    }

    // everything that a search looks at
    textOf(site) {
      if (!this.texts.has(site)) {
        const { module, frame, node, operation } = this.recording.sites[site];
        this.texts.set(site, [module, frame, node, operation, ...this.recording.stackOf(site)].join("\n").toLowerCase());
      }
      return this.texts.get(site);
    }

    matching() {
      const { recording, role, query } = this;
      const code = recording.roleNames.indexOf(role);
      const words = query.split(/\s+/).filter(Boolean);
      return this.live.filter((block) => {
        if (role && recording.blocks.role[block] !== code) return false;
        if (!words.length) return true;
        const { name, place } = recording.keepers[recording.blocks.keeper[block]];
        const text = `${this.textOf(recording.blocks.site[block])}\n${recording.roleNames[recording.blocks.role[block]]}\n${name}\n${place}`.toLowerCase();
        return words.every((word) => text.includes(word));
      });
    }

    sorted(groups) {
      const { recording } = this;
      const life = (group) => {
        const block = group.blocks[0], { events, lifeTime } = recording.blocks;
        return events[block] < 0 ? Infinity : lifeTime ? lifeTime[block] : events[block];
      };
      const keys = {
        role: (group) => [...group.roles].join(),
        bytes: (group) => group.bytes,
        count: (group) => group.blocks.length,
        text: (group) => group.who,
        life,
      };
      const key = keys[this.sort], sign = this.down ? -1 : 1;
      return groups.map((group) => [key(group), group]).sort(([a], [b]) => sign * (a < b ? -1 : a > b ? 1 : 0)).map(([, group]) => group);
    }

    draw() {
      const { recording } = this;
      const blocks = this.matching();
      const groups = this.sorted(groupBlocks(recording, blocks, this.by));
      for (const head of this.heads.children) {
        head.setAttribute("aria-sort", head.dataset.sort === this.sort ? (this.down ? "descending" : "ascending") : "none");
      }
      const bytes = blocks.reduce((sum, block) => sum + recording.blocks.bytes[block], 0);
      const all = this.live.reduce((sum, block) => sum + recording.blocks.bytes[block], 0);
      const total = this.scope === "live" ? recording.total[this.column] : all;
      this.found.textContent = `${number.format(blocks.length)} of ${number.format(this.live.length)} listed blocks, ${formatBytes(bytes)} of ${formatBytes(total)}${this.scope === "live" ? " allocated" : ""} (${formatShare(bytes, total)}), in ${number.format(groups.length)} ${groups.length === 1 ? "row" : "rows"}.`;
      this.body.replaceChildren(...groups.slice(0, this.rows).flatMap((group) => this.row(group)));
      this.more.hidden = groups.length <= this.rows;
      this.foot.replaceChildren(...this.sums(groups.slice(this.rows)));
    }

    row(group) {
      const { recording } = this;
      const roles = [...group.roles];
      const open = this.open.has(group.key);
      const opener = element("button", { type: "button", class: "open", "aria-expanded": String(open) }, element("span", { class: "name" }, group.text), group.more ? element("span", { class: "muted" }, ` ${group.more}`) : null);
      const line = element(
        "tr",
        { class: "group" },
        element("td", { class: "c-role" }, roles.length === 1 ? swatch(roles[0]) : null, roles.length === 1 ? roles[0] : `${roles.length} roles`),
        element("td", { class: "c-bytes" }, formatMib(group.bytes)),
        element("td", { class: "c-count" }, number.format(group.blocks.length)),
        element("td", { class: "c-text" }, opener),
        element("td", { class: "c-life muted" }, keptShort(recording, group.blocks[0]), recording.lifeText(group.blocks[0])),
      );
      const detail = element("tr", { class: "detail", hidden: !open });
      const fill = () => detail.childElementCount || detail.append(element("td", { colspan: "5" }, this.details(group)));
      if (open) fill();
      opener.addEventListener("click", () => {
        if (!this.open.delete(group.key)) this.open.add(group.key);
        detail.hidden = !this.open.has(group.key);
        opener.setAttribute("aria-expanded", String(!detail.hidden));
        fill();
      });
      return [line, detail];
    }

    // The largest block of a group with its stack, and the sizes of the others.
    details(group) {
      const { recording } = this;
      const block = group.blocks[0];
      const site = recording.sites[recording.blocks.site[block]];
      const made = element("div", { class: "details" });
      const title = group.blocks.length === 1 ? "" : `The largest of ${number.format(group.blocks.length)} blocks: `;
      made.append(element("p", {}, `${title}${formatBytes(recording.blocks.bytes[block])} (${number.format(recording.blocks.bytes[block])} bytes), ${recording.roleNames[recording.blocks.role[block]]}${site.module ? ", module " + site.module : ""}.`));
      made.append(element("ul", {}, ...reasons(recording, block).map((reason) => element("li", {}, reason))));
      const stack = recording.stackOf(recording.blocks.site[block]);
      made.append(element("p", { class: "muted" }, stack.length ? "Stack of the allocation, innermost first:" : site.node ? `No Python stack: autograd ran ${site.node}.` : "The recording has no stack for this block."));
      if (stack.length) made.append(element("ol", { class: "stack" }, ...stack.map((frame) => element("li", {}, frame))));
      return made;
    }

    // What the rows leave out, so that the table adds up to the allocated bytes.
    sums(hidden) {
      const { recording } = this;
      const lines = [];
      const add = (text, bytes, count) => lines.push(element("tr", {}, element("td", { class: "c-role" }, text), element("td", { class: "c-bytes" }, formatMib(bytes)), element("td", { class: "c-count" }, count === null ? "" : number.format(count)), element("td", { class: "c-text" }), element("td", { class: "c-life" })));
      if (hidden.length) {
        add(`${number.format(hidden.length)} more rows`, hidden.reduce((sum, group) => sum + group.bytes, 0), hidden.reduce((sum, group) => sum + group.blocks.length, 0));
      }
      if (this.role || this.query || this.scope !== "live") return lines;
      const rounding = recording.bytesAt(this.column).get("allocator_rounding") || 0;
      const listed = this.live.reduce((sum, block) => sum + recording.blocks.bytes[block], 0);
      const unlisted = recording.total[this.column] - rounding - listed;
      if (unlisted) add(`smaller blocks, under ${formatBytes(recording.leastBytes)}`, unlisted, null);
      if (rounding) add("allocator_rounding", rounding, null);
      add("total", recording.total[this.column], null);
      lines[lines.length - 1].className = "total";
      return lines;
    }
  }

  Object.assign(ligerprof, { Blocks, groupBlocks, reasons, withoutIndices, swatch });
})();
