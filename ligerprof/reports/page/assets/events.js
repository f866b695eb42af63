// The allocator's events as a list: of the part that the timeline shows, filtered by text, action and size.
"use strict";
(() => {
  const { element, csvButton, formatMib, formatTime, number, parseBytes } = ligerprof;
  const FIRST = 100;

  class Events {
    constructor(host, recording, timeline, choose) {
      Object.assign(this, { host, recording, timeline, choose, rows: FIRST });
      const actions = recording.events.names;
      this.search = element("input", { type: "search", placeholder: "module, file, role …", "aria-label": "Search events", oninput: () => this.draw() });
      this.action = element("select", { "aria-label": "Action", onchange: () => this.draw() }, element("option", { value: "" }, "all actions"), ...actions.map((name) => element("option", { value: name }, name)));
      this.least = element("input", { type: "search", placeholder: "1 MiB", size: "8", "aria-label": "At least this size", oninput: () => this.draw() });
      this.found = element("p", { class: "caption", "aria-live": "polite" });
      this.body = element("tbody");
      this.more = element("button", { type: "button", class: "more", onclick: () => this.draw(this.rows + 10 * FIRST) }, "Show more events");
      const heads = ["event", "time", "step", "action", "size", "role", "allocated by", "address"];
      host.append(
        element("div", { class: "bar" }, element("label", {}, "Search ", this.search), this.action, element("label", {}, "at least ", this.least), csvButton("events.csv", () => [heads, ...this.matching().map((row) => this.cells(row, true))])),
        this.found,
        element("div", { class: "scroll" }, element("table", { class: "events" }, element("thead", {}, element("tr", {}, ...heads.map((head, i) => element("th", { scope: "col", class: i >= 5 ? "text" : "" }, head)))), this.body)),
        this.more,
      );
    }

    show() {
      this.draw();
    }

    cells(row, exact = false) {
      const { recording } = this;
      const column = recording.columnOf(row.index + 1);
      const site = row.block < 0 ? null : recording.sites[recording.blocks.site[row.block]];
      const step = recording.stepAt(row.index);
      const time = !recording.hasTimes ? "" : exact ? recording.times[column] : formatTime(recording.times[column], recording.times[recording.count]);
      return [exact ? row.index : number.format(row.index), time, step || "", row.action, exact ? row.bytes : formatMib(row.bytes), site ? recording.roleNames[recording.blocks.role[row.block]] : "", site ? [site.module, site.frame || site.node].filter(Boolean).join(", ") : "", row.address ? "0x" + row.address.toString(16) : ""];
    }

    matching() {
      const { recording } = this;
      const [from, to] = this.timeline.momentsShown;
      const words = this.search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
      const action = this.action.value, least = parseBytes(this.least.value);
      const rows = recording.eventRows.filter((row) => row.index >= from && row.index < to && (!action || row.action === action) && row.bytes >= least);
      return words.length ? rows.filter((row) => { const text = this.cells(row).join("\n").toLowerCase(); return words.every((word) => text.includes(word)); }) : rows;
    }

    draw(rows = FIRST) {
      this.rows = rows;
      const { recording } = this, found = this.matching();
      const listed = recording.events.actions.length;
      const kept = listed === recording.last ? "" : ` The file has ${number.format(listed)} of the recording's ${number.format(recording.last)} events.`;
      this.found.textContent = `${number.format(found.length)} of ${number.format(listed)} events: those of the part that the chart shows. Choose one to see its moment.${kept}`;
      this.body.replaceChildren(...found.slice(0, rows).map((row) => {
        const [index, ...cells] = this.cells(row);
        const open = element("button", { type: "button", class: "open", onclick: () => this.choose(row.index + 1) }, index);
        return element("tr", {}, element("td", {}, open), ...cells.map((text, i) => element("td", { class: i >= 4 ? "text" : "" }, String(text))));
      }));
      this.more.hidden = found.length <= rows;
    }
  }

  ligerprof.Events = Events;
})();
