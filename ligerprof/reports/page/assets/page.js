// Builds the parts of a page: theme, timelines, and what is shown for a chosen moment.
"use strict";
(() => {
  const { element, formatBytes, unpack, Recording, Timeline, Blocks, Flame, Segments, WhatIf } = ligerprof;
  const root = document.documentElement;
  const pages = [];

  // Light, dark, or what the system says; kept for this page only.
  const themeButton = () => {
    const themes = ["auto", "light", "dark"];
    const button = element("button", { type: "button", class: "theme" });
    const name = () => {
      const theme = root.dataset.theme || "auto";
      button.textContent = `theme: ${theme}`;
      button.setAttribute("aria-label", `Theme: ${theme}. Change it.`);
    };
    button.addEventListener("click", () => {
      root.dataset.theme = themes[(themes.indexOf(root.dataset.theme || "auto") + 1) % themes.length];
      if (root.dataset.theme === "auto") delete root.dataset.theme;
      name();
      recolor();
    });
    name();
    return button;
  };
  const recolor = () => pages.forEach((page) => [page.timeline, ...page.views].forEach((part) => part.recolor && part.recolor()));

  // What is shown of one recording: its timeline, and the blocks of a moment in several views.
  class View {
    constructor(host, recording, options) {
      this.recording = recording;
      this.timelineHost = host.querySelector(".timeline-host");
      this.timeline = new Timeline(this.timelineHost, recording, { ...options, pick: (moment, role) => this.choose(moment, role, true) });
      this.momentHost = host.querySelector(".moment-host");
      const changes = host.querySelector(".changes-host");
      if (changes && recording.whatIfs.length) new WhatIf(changes, recording, this.timeline);
      const blocks = host.querySelector(".blocks-host"), flame = host.querySelector(".flame-host");
      this.views = [];
      if (blocks) this.views.push(new Blocks(blocks, recording));
      if (flame) this.views.push(new Flame(flame, recording));
      const segments = host.querySelector(".segments-host");
      if (segments) this.views.push(new Segments(segments, recording));
      if (this.views.length) this.choose(recording.marks.failure ? recording.marks.failure.moment : recording.marks.peak.moment, null, false);
    }

    choose(moment, role, move) {
      this.moment = moment;
      const { peak, failure } = this.recording.marks;
      this.own = moment !== peak.moment && !(failure && moment === failure.moment) ? moment : this.own;
      this.drawMoments();
      for (const view of this.views) view.show(moment, role);
      this.timeline.mark(move ? moment : undefined);
      if (move && this.momentHost) this.momentHost.scrollIntoView({ block: "nearest", behavior: "smooth" });
    }

    drawMoments() {
      if (!this.momentHost) return;
      const { recording } = this;
      const { peak, failure } = recording.marks;
      const entries = [[failure && failure.moment, "failed allocation"], [peak.moment, "peak"], [this.own, "chosen moment"]];
      const buttons = entries
        .filter(([moment]) => moment !== undefined)
        .map(([moment, name]) => {
          const column = recording.columnOf(moment);
          const text = `${name}: ${recording.timeText(column)}, ${formatBytes(recording.total[column])}`;
          return element("button", { type: "button", "aria-pressed": String(moment === this.moment), onclick: () => this.choose(moment, null, false) }, text);
        });
      this.momentHost.replaceChildren(element("span", {}, "Memory at the "), ...buttons);
    }
  }

  const build = async () => {
    const started = performance.now();
    const header = document.querySelector("header");
    header.append(themeButton());
    if (!("DecompressionStream" in window)) {
      for (const host of document.querySelectorAll(".recording")) host.prepend(element("p", { class: "warning" }, "This browser cannot unpack the recording: DecompressionStream is missing. Use a browser from 2023 or later."));
      return;
    }
    const hosts = [...document.querySelectorAll(".recording")];
    const recordings = [];
    for (const host of hosts) {
      const { values, column } = await unpack(document.getElementById(host.dataset.source).textContent);
      recordings.push(new Recording(values, column));
    }
    // recordings side by side share one height
    const tallest = Math.max(...recordings.flatMap((recording) => [recording.marks.peak.bytes, recording.reserved.reduce((most, value) => Math.max(most, value), 0)]));
    let linked = false;
    const sync = (moved, from, to) => linked && pages.forEach((page) => page.timeline !== moved && page.timeline.follow(from, to));
    hosts.forEach((host, index) => pages.push(new View(host, recordings[index], { tallest, sync })));
    const link = document.querySelector(".linked");
    if (link) {
      const box = element("input", { type: "checkbox" });
      box.addEventListener("change", () => {
        linked = box.checked;
        const { view, end } = pages[0].timeline;
        sync(pages[0].timeline, view[0] / end, view[1] / end);
      });
      link.append(element("label", {}, box, " zoom both to the same share of their recordings"));
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
    root.dataset.drawnMs = Math.round(performance.now() - started);
    root.dataset.ready = "yes";
  };

  ligerprof.pages = pages;
  build().catch((error) => {
    root.dataset.failed = String(error && error.message);
    document.querySelector("main").prepend(element("p", { class: "warning" }, `This page could not be drawn: ${error && error.message}`));
    throw error;
  });
})();
