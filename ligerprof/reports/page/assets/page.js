// Builds the parts of a page: theme, timelines, and what is shown for a chosen moment.
"use strict";
(() => {
  const { element, formatLike, unpack, Recording, Timeline, Blocks, Events, Flame, Segments, WhatIf } = ligerprof;
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
      this.timeline = new Timeline(this.timelineHost, recording, {
        ...options,
        legendHost: host.querySelector(".legend-host"),
        pick: (moment, role) => this.choose(moment, role, true),
        moved: () => this.moved(),
      });
      this.momentHost = host.querySelector(".moment-host");
      const changes = host.querySelector(".changes-host");
      if (changes && recording.whatIfs.length) new WhatIf(changes, recording, this.timeline);
      const blocks = host.querySelector(".blocks-host"), flame = host.querySelector(".flame-host");
      this.views = [];
      if (blocks) this.views.push(new Blocks(blocks, recording));
      if (flame) this.views.push(new Flame(flame, recording));
      const segments = host.querySelector(".segments-host");
      if (segments) this.views.push(new Segments(segments, recording));
      const events = host.querySelector(".events-host");
      if (events) this.views.push(new Events(events, recording, this.timeline, (moment) => this.choose(moment, null, true)));
      this.scopeChoice = element(
        "select",
        { "aria-label": "Which blocks", onchange: () => this.choose(this.moment, null, false) },
        element("option", { value: "live" }, "live at this moment"),
        element("option", { value: "made" }, "allocated in the part shown"),
        element("option", { value: "left" }, "allocated there and not freed in it"),
        recording.hasLeaks ? element("option", { value: "leaks" }, "leaks: outlive a whole step") : null,
      );
      for (const part of host.querySelectorAll("details")) part.addEventListener("toggle", () => part.open && this.show(null));
      if (this.views.length) this.choose(this.openingMoment(), null, false);
    }

    // the failed allocation, else the highest moment of the part that the page opens at
    openingMoment() {
      const { recording, timeline } = this, { peak, failure } = recording.marks, [from, to] = timeline.momentsShown;
      if (failure) return failure.moment;
      if (peak.moment >= from && peak.moment <= to) return peak.moment;
      return recording.moments[timeline.highestWithin(from, to)];
    }
    // the part that the chart shows has changed
    moved() {
      clearTimeout(this.waiting);
      this.waiting = setTimeout(() => this.show(null, true), 150);
    }
    // what is closed is drawn when it is opened
    show(role, moved = false) {
      const name = this.scopeChoice.value;
      const range = this.timeline.momentsShown;
      const blocks = this.recording.blocksOf(name, this.moment, range);
      for (const view of this.views) {
        const ofRange = view instanceof Events || (!(view instanceof Segments) && name !== "live" && name !== "leaks");
        const part = view.host.closest("details");
        if ((!moved || ofRange) && (!part || part.open)) view.show(this.moment, role, { name, blocks });
      }
    }

    choose(moment, role, move) {
      this.moment = moment;
      const { peak, failure } = this.recording.marks;
      this.own = moment !== peak.moment && !(failure && moment === failure.moment) ? moment : this.own;
      this.drawMoments();
      // a click into the chart asks for what was live then
      if (move) this.scopeChoice.value = "live";
      this.show(role);
      this.timeline.mark(this.own === moment ? moment : undefined);
      // where the blocks are below the chart, both are in the window after this
      const { chart } = this.timeline;
      if (move && this.momentHost && this.momentHost.getBoundingClientRect().top > chart.getBoundingClientRect().bottom) {
        if (this.momentHost.getBoundingClientRect().top > 0.75 * innerHeight || chart.getBoundingClientRect().top < 0) chart.scrollIntoView({ block: "start", behavior: "smooth" });
      }
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
          const text = `${name}: ${recording.timeText(column)}, ${formatLike(recording.total[column], peak.bytes)}`;
          return element("button", { type: "button", "aria-pressed": String(moment === this.moment), onclick: () => this.choose(moment, null, false) }, text);
        });
      this.momentHost.replaceChildren(element("span", {}, "Blocks at the "), ...buttons, this.scopeChoice);
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
    const tallest = ligerprof.largest = Math.max(...recordings.flatMap((recording) => [recording.marks.peak.bytes, recording.reserved.reduce((most, value) => Math.max(most, value), 0)]));
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
