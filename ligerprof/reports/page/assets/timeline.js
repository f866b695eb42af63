// Bytes by role over a recording: uPlot draws the stack; an overview below it carries the brush.
"use strict";
(() => {
  const { element, formatBytes, formatLike, formatTime, formatShare, number, upperBound, lowerBound, Extremes } = ligerprof;
  const SMALLEST_SPAN = 8;
  const OVERVIEW_BINS = 500;
  const STRIP = 14;
  // room for the labels of the axes
  const LEFT = 74;
  const RIGHT = 22;
  const higher = (a, b) => a > b;
  const lower = (a, b) => a < b;

  const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // ticks at round numbers of binary units
  const byteSplits = (u, axis, low, high) => {
    const unit = high >= ligerprof.GIB ? ligerprof.GIB : high >= ligerprof.MIB ? ligerprof.MIB : ligerprof.KIB;
    const rough = high / unit / 5;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power * unit;
    return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
  };
  const byteLabels = (u, splits) => {
    const most = splits[splits.length - 1] || 0;
    const [unit, name] = most >= ligerprof.GIB ? [ligerprof.GIB, "GiB"] : most >= ligerprof.MIB ? [ligerprof.MIB, "MiB"] : [ligerprof.KIB, "KiB"];
    return splits.map((value) => `${+(value / unit).toFixed(2)} ${name}`);
  };

  class Timeline {
    // pick: callback invoked with (moment, role name or null) when a place is clicked, tapped or chosen by Enter
    // moved: callback invoked when another part is shown
    constructor(host, recording, { pick = () => {}, moved = () => {}, legendHost = host, tallest = 0, sync = null } = {}) {
      Object.assign(this, { host, recording, pick, moved, legendHost, tallest, sync, single: false });
      this.hidden = new Set();
      this.axis = recording.hasTimes ? "time" : "events";
      this.fit = false;
      this.cursor = null;
      this.lowestTree = new Extremes(recording.lowest, lower);
      this.reservedTree = new Extremes(recording.reserved, higher);
      this.build();
      this.sum();
      const [from, to] = recording.opens;
      this.view = [this.places[recording.columnOf(from)], this.places[recording.columnOf(to) + 1]];
      if (!(this.view[1] - this.view[0] >= SMALLEST_SPAN)) this.view = [0, this.end];
      this.create();
      new ResizeObserver(() => this.resize()).observe(this.chart);
    }

    // a strip of phases, and above it one of steps
    get stripCount() {
      return this.recording.steps.length ? 2 : 1;
    }
    // first and last moment of the part shown
    get momentsShown() {
      const { recording } = this;
      const [first, last] = this.view.map((place) => Math.max(0, upperBound(this.places, place) - 1));
      return [recording.starts[first], this.view[1] >= this.end ? recording.last + 1 : recording.starts[last]];
    }
    // the column of the highest bytes between two moments
    highestWithin(from, to) {
      const { recording } = this;
      const first = recording.columnOf(from);
      return this.tree.within(first, Math.max(first + 1, recording.columnOf(to)));
    }
    setSingle(single) {
      this.single = single;
      this.singleButton.setAttribute("aria-pressed", String(single));
      this.redraw();
    }

    get places() {
      return this.axis === "time" ? this.recording.times : this.recording.eventPlaces;
    }
    get end() {
      return this.places[this.recording.count];
    }

    build() {
      const button = (label, text, act, extra = {}) => element("button", { type: "button", "aria-label": label, title: label, onclick: act, ...extra }, text);
      const { marks, hasTimes } = this.recording;
      this.range = element("span", { class: "range", "aria-live": "polite" });
      this.axisButton = hasTimes && button("Axis: time or events", "time", () => this.setAxis(this.axis === "time" ? "events" : "time"));
      this.fitButton = button("Fit the height to the part shown", "fit height", () => this.setFit(!this.fit), { "aria-pressed": "false" });
      const bar = element(
        "div",
        { class: "bar", role: "toolbar", "aria-label": "Zoom" },
        button("Zoom in", "+", () => this.zoom(0.5)),
        button("Zoom out", "−", () => this.zoom(2)),
        button("Move left", "◀", () => this.pan(-0.4)),
        button("Move right", "▶", () => this.pan(0.4)),
        button("Show the whole recording", "all", () => this.setView(0, this.end)),
        button("Zoom to the peak", "peak", () => this.zoomTo(marks.peak.moment)),
        marks.failure ? button("Zoom to the failed allocation", "failure", () => this.zoomTo(marks.failure.moment), { class: "failure" }) : null,
        this.axisButton || null,
        this.fitButton,
        (this.singleButton = button("One shape per allocation, over its life", "each block", () => this.setSingle(!this.single), { "aria-pressed": "false" })),
        this.range,
      );
      this.chart = element("div", {
        class: "chart",
        tabindex: "0",
        role: "application",
        "aria-label":
          "Allocated bytes by role over the recording. Left and right move the cursor, up and down choose the role, Enter lists its blocks, plus and minus zoom, Page Up and Page Down move the view, Home shows everything, P goes to the peak.",
      });
      this.overview = element("div", { class: "overview" });
      this.brush = element("div", { class: "brush" }, element("i", { class: "grip left" }), element("i", { class: "grip right" }));
      this.legend = element("div", { class: "legend" });
      for (const role of this.recording.roles) {
        const swatch = element("i", { class: "swatch" });
        swatch.style.setProperty("--fill", `var(--role-${role.name})`);
        swatch.style.setProperty("--edge", `var(--edge-${role.name})`);
        const toggle = element("button", { type: "button", "aria-pressed": "true", title: role.meaning, "data-role": role.name }, swatch, role.name);
        toggle.addEventListener("click", () => {
          if (!this.hidden.delete(role.name)) this.hidden.add(role.name);
          toggle.setAttribute("aria-pressed", String(!this.hidden.has(role.name)));
          this.sum();
          this.redraw();
        });
        this.legend.append(toggle);
      }
      this.legend.append(
        element("span", { class: "key" }, element("i", { class: "line reserved" }), "reserved"),
        (this.recording.marks.earlier || []).length ? element("span", { class: "key" }, element("i", { class: "line earlier" }), "earlier failures, caught") : "",
        element("span", { class: "key" }, element("i", { class: "line lowest" }), "lowest in each part"),
        (this.changeKey = element("span", { class: "key", hidden: true }, element("i", { class: "line change" }), "with the change")),
      );
      this.tip = element("div", { class: "tip", hidden: true, role: "status" });
      this.caption = element("p", { class: "caption" });
      this.host.append(element("div", { class: "timeline" }, bar, this.chart, this.overview, this.tip));
      this.legendHost.append(this.legend, this.caption);
      this.chart.addEventListener("keydown", (event) => this.key(event));
    }

    sum() {
      const { recording } = this;
      this.shown = new Float64Array(recording.count);
      for (const role of recording.roles) {
        if (this.hidden.has(role.name)) continue;
        const bytes = role.bytes;
        for (let i = 0; i < recording.count; i++) this.shown[i] += bytes[i];
      }
      this.tree = new Extremes(this.shown, higher);
      const full = Math.max(recording.total[new Extremes(recording.total, higher).within(0, recording.count)], recording.reserved[this.reservedTree.within(0, recording.count)]);
      this.height = Math.max(full, this.tallest, 1) * 1.06;
    }

    // Show the recording with a change, or as it was: `lower` says how much lower each column is.
    tryChange(change) {
      this.change = change;
      this.changeKey.hidden = !change;
      this.after = change && Float64Array.from(this.recording.total, (bytes, i) => bytes - change.lower[i]);
      this.afterTree = change && new Extremes(this.after, higher);
      this.redraw();
      this.drawOverview();
    }

    // The columns of a range, one bin for each pixel: [where it starts, the column shown, lowest and reserved bytes].
    bins(from, to, count) {
      const { places, recording } = this;
      const first = Math.max(0, upperBound(places, from) - 1);
      // of columns that start at the same time, the last has the width
      const last = Math.min(recording.count, Math.max(first + 1, lowerBound(places, to)));
      const width = (to - from) / count;
      const found = { x: [], column: [], lowest: [], reserved: [], after: [] };
      const push = (start, stop) => {
        found.x.push(Math.max(places[start], from));
        found.column.push(this.tree.within(start, stop));
        found.lowest.push(recording.lowest[this.lowestTree.within(start, stop)]);
        found.reserved.push(recording.reserved[this.reservedTree.within(start, stop)]);
        found.after.push(this.after ? this.after[this.afterTree.within(start, stop)] : null);
      };
      for (let k = first; k < last; ) {
        const place = Math.max(places[k], from);
        const edge = from + (Math.floor((place - from) / width) + 1) * width;
        let stop = Math.min(last, Math.max(k + 1, lowerBound(places, edge, k, last)));
        // a column that goes beyond its pixel is drawn by itself, so that a short spike does not look long
        if (stop - k > 1 && places[stop] > edge + width) stop -= 1;
        push(k, stop);
        k = stop;
      }
      return found;
    }

    data(from, to, count) {
      const { recording } = this;
      const bins = this.bins(from, to, count);
      const size = bins.x.length;
      const x = Float64Array.from({ length: size + 1 }, (_, i) => (i < size ? bins.x[i] : to));
      const series = [];
      let below = new Float64Array(size + 1);
      for (const role of recording.roles) {
        const above = Float64Array.from(below);
        if (!this.hidden.has(role.name) && !(this.single && from === this.view[0] && to === this.view[1])) {
          const bytes = role.bytes;
          for (let i = 0; i < size; i++) above[i] += bytes[bins.column[i]];
          above[size] = above[size - 1];
        }
        series.push((below = above));
      }
      const held = (values) => Float64Array.from({ length: size + 1 }, (_, i) => values[Math.min(i, size - 1)]);
      // the top of the stack is drawn first, and what is below it covers its lower part
      return { bins, data: [x, ...series.reverse(), held(bins.reserved), held(bins.lowest), this.after ? held(bins.after) : new Array(size + 1).fill(null)] };
    }

    series() {
      const stepped = uPlot.paths.stepped({ align: 1 });
      const roles = [...this.recording.roles].reverse().map((role) => ({
        label: role.name,
        fill: () => styleOf(`--role-${role.name}`),
        stroke: () => styleOf(`--edge-${role.name}`),
        width: 1,
        paths: stepped,
        points: { show: false },
      }));
      const line = (label, variable, dash) => ({ label, stroke: () => styleOf(variable), width: 1.5, dash, paths: stepped, points: { show: false } });
      return [{}, ...roles, line("reserved", "--ink", [6, 3]), line("lowest", "--low-line", [2, 2]), { ...line("with the change", "--accent", []), width: 2.5 }];
    }

    create() {
      const width = this.chart.clientWidth || 600;
      const grid = { stroke: () => styleOf("--rule"), width: 1 };
      const text = { stroke: () => styleOf("--muted"), font: "12px system-ui, sans-serif", grid, ticks: grid };
      this.plot = new uPlot(
        {
          width,
          height: this.plotHeight(width),
          padding: [this.stripCount * STRIP + 6, RIGHT, 0, 0],
          legend: { show: false },
          scales: { x: { time: false, range: () => this.view }, y: { range: () => [0, this.shownHeight()] } },
          axes: [
            { ...text, size: 30, space: 80, values: (u, splits) => this.placeLabels(splits), incrs: this.increments() },
            { ...text, size: LEFT, splits: byteSplits, values: byteLabels },
          ],
          series: this.series(),
          cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => this.setView(0, this.end) } },
          hooks: { setSelect: [(u) => this.select(u)], draw: [(u) => this.drawMarks(u)] },
        },
        this.current().data,
        this.chart,
      );
      const { over } = this.plot;
      over.addEventListener("pointermove", (event) => this.point(event));
      over.addEventListener("pointerleave", () => this.leave());
      over.addEventListener("click", (event) => this.choose(event));
      over.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
      this.overviewPlot = new uPlot(
        {
          width,
          height: 56,
          padding: [2, RIGHT, 2, LEFT],
          legend: { show: false },
          scales: { x: { time: false, range: () => [0, this.end] }, y: { range: () => [0, this.height] } },
          axes: [{ show: false }, { show: false }],
          series: this.series().map((one, index) => (index && index <= this.recording.roles.length ? { ...one, width: 0 } : { ...one, show: index === 0 })),
          cursor: { show: false },
        },
        this.data(0, this.end, OVERVIEW_BINS).data,
        this.overview,
      );
      this.overviewPlot.over.append(this.brush);
      this.overviewPlot.over.addEventListener("pointerdown", (event) => this.dragBrush(event));
      this.describe();
      // uPlot has its size only after this task
      this.redraw();
    }

    plotHeight(width) {
      return width < 500 ? 260 : 380;
    }
    shownHeight() {
      if (!this.fit || !this.shownBins) return this.height;
      let most = 1;
      for (const column of this.shownBins.column) most = Math.max(most, this.shown[column]);
      return most * 1.08;
    }
    // round steps of the x axis, as whole microseconds or events
    increments() {
      return Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();
    }
    placeLabels(splits) {
      const span = this.view[1];
      const step = splits.length > 1 ? splits[1] - splits[0] : 1;
      if (this.axis !== "time") return splits.map((value) => number.format(value));
      const [unit, name] = span >= 1e6 && step >= 1e3 ? [1e6, "s"] : span >= 1e3 && step >= 1 ? [1e3, "ms"] : [1, "µs"];
      const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
      return splits.map((value) => `${(value / unit).toFixed(digits)} ${name}`);
    }
    placeText(place, span) {
      return this.axis === "time" ? formatTime(place, Math.max(span, 1)) : number.format(Math.round(place));
    }

    current() {
      const width = this.plot ? this.plot.over.clientWidth : this.chart.clientWidth;
      const made = this.data(this.view[0], this.view[1], Math.max(100, width || 600));
      this.shownBins = made.bins;
      return made;
    }

    redraw() {
      if (this.waiting) return;
      this.waiting = requestAnimationFrame(() => {
        this.waiting = 0;
        const started = performance.now();
        const made = this.current().data;
        this.shapes = this.single ? new ligerprof.Shapes(this.recording, this.visibleBlocks(), this.momentsShown) : null;
        this.plot.setData(made);
        this.placeBrush();
        const shown = this.momentsShown.join();
        if (shown !== this.wasShown) this.moved();
        this.wasShown = shown;
        this.describe();
        this.host.dataset.redrawMs = (performance.now() - started).toFixed(1);
      });
    }
    visibleBlocks() {
      const { roleNames, blocks } = this.recording;
      return Array.from(blocks.role.keys()).filter((block) => !this.hidden.has(roleNames[blocks.role[block]]));
    }
    drawOverview() {
      this.overviewPlot.setData(this.data(0, this.end, OVERVIEW_BINS).data);
      this.placeBrush();
    }
    recolor() {
      this.plot.redraw(false, true);
      this.overviewPlot.redraw(false, true);
    }
    resize() {
      const width = this.chart.clientWidth;
      if (!width || width === this.plot.width) return;
      this.plot.setSize({ width, height: this.plotHeight(width) });
      this.overviewPlot.setSize({ width, height: 56 });
      this.redraw();
    }

    setView(from, to) {
      const span = Math.min(this.end, Math.max(SMALLEST_SPAN, to - from));
      const middle = (from + to) / 2;
      const start = Math.max(0, Math.min(this.end - span, middle - span / 2));
      this.view = [start, start + span];
      this.hideTip();
      this.redraw();
      if (this.sync) this.sync(this, this.view[0] / this.end, this.view[1] / this.end);
    }
    // the same part of another recording
    follow(from, to) {
      this.view = [from * this.end, to * this.end];
      this.redraw();
    }
    zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
      const [from, to] = this.view;
      const span = Math.min(this.end, Math.max(SMALLEST_SPAN, (to - from) * factor));
      const share = (around - from) / (to - from);
      this.setView(around - share * span, around - share * span + span);
    }
    pan(share) {
      const step = share * (this.view[1] - this.view[0]);
      this.setView(this.view[0] + step, this.view[1] + step);
    }
    // the part around a moment: some hundred columns, or a hundredth of the recording in time
    zoomTo(moment) {
      const column = this.recording.columnOf(moment);
      const low = Math.max(0, column - 150), high = Math.min(this.recording.count, column + 150);
      const place = this.places[column];
      const half = Math.max(SMALLEST_SPAN, place - this.places[low], this.places[high] - place);
      this.setView(place - half, place + half);
    }
    setAxis(axis) {
      const { recording } = this;
      const columns = this.view.map((place) => Math.max(0, upperBound(this.places, place) - 1));
      const whole = this.view[0] <= 0 && this.view[1] >= this.end;
      this.axis = axis;
      this.axisButton.textContent = axis;
      this.view = whole ? [0, this.end] : [this.places[columns[0]], this.places[Math.min(recording.count, columns[1] + 1)]];
      this.setView(...this.view);
      this.drawOverview();
    }
    setFit(fit) {
      this.fit = fit;
      this.fitButton.setAttribute("aria-pressed", String(fit));
      this.redraw();
    }

    describe() {
      const [from, to] = this.view;
      const { recording } = this;
      const first = upperBound(this.places, from) - 1, last = Math.max(first, lowerBound(this.places, to) - 1);
      const stop = last + 1 < recording.count ? recording.starts[last + 1] : recording.last + 1;
      const moments = stop - recording.starts[Math.max(first, 0)];
      const columns = last - Math.max(first, 0) + 1;
      this.range.textContent = `${this.placeText(from, to)} – ${this.placeText(to, to)}, ${number.format(moments)} events`;
      const detail = columns === moments ? "the file has every event of this part" : `the file has ${number.format(columns)} columns for this part, each the highest of its events`;
      const drawn = this.shownBins.column.length;
      const merged = drawn < columns ? `each pixel shows the highest of its columns, ${number.format(Math.round(columns / drawn))} on average; zoom in to see more` : "each column is drawn";
      this.caption.textContent = `Allocated bytes, stacked by role: ${detail}; ${merged}.`;
    }

    // ---- pointer and keyboard

    binAt(place) {
      return Math.max(0, Math.min(this.shownBins.x.length - 1, upperBound(this.shownBins.x, place) - 1));
    }
    roleAt(column, bytes) {
      let above = 0;
      for (const role of this.recording.roles) {
        if (this.hidden.has(role.name)) continue;
        above += role.bytes[column];
        if (bytes <= above) return role;
      }
      return null;
    }
    locate(event) {
      const box = this.plot.over.getBoundingClientRect();
      const left = event.clientX - box.left, top = event.clientY - box.top;
      const column = this.shownBins.column[this.binAt(this.plot.posToVal(left, "x"))], bytes = this.plot.posToVal(top, "y");
      const block = this.shapes ? this.shapes.at(this.recording.moments[column], bytes) : -1;
      const role = block < 0 ? this.shapes ? null : this.roleAt(column, bytes) : this.recording.roles.find(({ name }) => name === this.recording.roleNames[this.recording.blocks.role[block]]);
      return { column, role, block, left, top };
    }
    point(event) {
      const place = this.locate(event);
      this.showTip(place);
    }
    leave() {
      this.hideTip();
    }
    choose(event) {
      const place = this.locate(event);
      this.cursor = { column: place.column, role: place.role };
      this.showTip(place);
      this.pick(this.recording.moments[place.column], place.role && place.role.name);
    }
    select(u) {
      const { left, width } = u.select;
      if (width > 4) this.setView(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
      if (width) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    }
    wheel(event) {
      // a page that scrolls past the chart does not zoom it
      if (!event.ctrlKey && !event.shiftKey && !event.metaKey && document.activeElement !== this.chart) return;
      event.preventDefault();
      const left = event.clientX - this.plot.over.getBoundingClientRect().left;
      this.zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, this.plot.posToVal(left, "x"));
    }
    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const acts = {
        ArrowLeft: () => this.step(-1),
        ArrowRight: () => this.step(1),
        ArrowUp: () => this.stepRole(1),
        ArrowDown: () => this.stepRole(-1),
        PageUp: () => this.pan(-0.4),
        PageDown: () => this.pan(0.4),
        Home: () => this.setView(0, this.end),
        "+": () => this.zoom(0.5, this.cursorPlace()),
        "=": () => this.zoom(0.5, this.cursorPlace()),
        "-": () => this.zoom(2, this.cursorPlace()),
        0: () => this.setView(0, this.end),
        p: () => this.zoomTo(this.recording.marks.peak.moment),
        f: () => this.recording.marks.failure && this.zoomTo(this.recording.marks.failure.moment),
        Enter: () => this.cursor && this.pick(this.recording.moments[this.cursor.column], this.cursor.role && this.cursor.role.name),
        Escape: () => this.hideTip(),
      };
      const act = acts[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    }
    cursorPlace() {
      return this.cursor ? this.places[this.cursor.column] : (this.view[0] + this.view[1]) / 2;
    }
    step(by) {
      const bins = this.shownBins;
      const middle = this.cursor ? this.places[this.cursor.column] : (this.view[0] + this.view[1]) / 2;
      const bin = Math.max(0, Math.min(bins.x.length - 1, this.binAt(Math.max(middle, this.view[0])) + (this.cursor ? by : 0)));
      const column = bins.column[bin];
      const role = (this.cursor && this.cursor.role) || this.largestRole(column);
      this.showAt(column, role);
    }
    stepRole(by) {
      if (!this.cursor) return this.step(0);
      const held = this.recording.roles.filter((role) => !this.hidden.has(role.name) && role.bytes[this.cursor.column] > 0);
      const index = held.indexOf(this.cursor.role);
      this.showAt(this.cursor.column, held[Math.max(0, Math.min(held.length - 1, index + by))] || null);
    }
    largestRole(column) {
      return this.recording.roles.reduce((best, role) => (!best || role.bytes[column] > best.bytes[column] ? role : best), null);
    }
    showAt(column, role) {
      this.cursor = { column, role };
      let below = 0;
      for (const one of this.recording.roles) {
        if (one === role) break;
        if (!this.hidden.has(one.name)) below += one.bytes[column];
      }
      const middle = below + (role ? role.bytes[column] / 2 : 0);
      const left = this.plot.valToPos(Math.max(this.places[column], this.view[0]), "x"), top = this.plot.valToPos(middle, "y");
      this.plot.setCursor({ left, top });
      this.showTip({ column, role, left, top });
    }

    showTip({ column, role, block = -1, left, top }) {
      this.drawOver(block);
      const { recording } = this;
      const running = recording.running[recording.ran[column]];
      const [step, phase, place] = running;
      const what = [step ? `step ${step}` : "", phase, place].filter(Boolean).join(" · ");
      const total = this.shown[column];
      this.tip.replaceChildren(
        element("div", { class: "head" }, `${recording.timeText(column)}: ${formatBytes(total)} of ${formatBytes(recording.reserved[column])} reserved`),
        what ? element("div", { class: "muted" }, what) : "",
        this.change ? element("div", { class: "muted" }, `with the change: at most ${formatBytes(this.after[column])}`) : "",
      );
      if (block >= 0) this.describeBlocks(role, column, [block]);
      else if (role) this.describeRole(role, column);
      else for (const one of this.largestRoles(column)) this.tip.append(this.roleLine(one, column));
      this.tip.hidden = false;
      const chart = this.plot.over.getBoundingClientRect(), host = this.tip.parentElement.getBoundingClientRect();
      const x = chart.left - host.left + left, y = chart.top - host.top + top;
      const wide = this.tip.offsetWidth, high = this.tip.offsetHeight;
      this.tip.style.left = `${Math.max(2, Math.min(host.width - wide - 2, x + 14 + wide > host.width ? x - wide - 14 : x + 14))}px`;
      this.tip.style.top = `${Math.max(2, Math.min(host.height - high - 2, y - high / 2))}px`;
    }
    largestRoles(column) {
      return this.recording.roles.filter((role) => role.bytes[column] > 0).sort((a, b) => b.bytes[column] - a.bytes[column]).slice(0, 5);
    }
    roleLine(role, column) {
      const bytes = role.bytes[column];
      const line = element("div", { class: "role" }, `${role.name} ${formatBytes(bytes)} (${formatShare(bytes, this.shown[column])})`);
      line.style.setProperty("--fill", `var(--role-${role.name})`);
      return line;
    }
    describeRole(role, column) {
      const { recording } = this;
      this.tip.append(this.roleLine(role, column));
      const code = recording.roleNames.indexOf(role.name);
      this.describeBlocks(null, column, recording.liveAt(recording.moments[column]).filter((block) => recording.blocks.role[block] === code));
    }
    describeBlocks(role, column, live) {
      const { recording } = this;
      if (role) this.tip.append(this.roleLine(role, column));
      const groups = ligerprof.groupBlocks(recording, live, "place").slice(0, 3);
      for (const group of groups) {
        const lines = [element("div", { class: "who" }, `${formatBytes(group.bytes)} in ${number.format(group.blocks.length)} ${group.blocks.length === 1 ? "block" : "blocks"}: ${group.who || "no stack recorded"}`)];
        lines.push(element("div", { class: "why muted" }, ligerprof.reasons(recording, group.blocks[0]).join("; ")));
        this.tip.append(...lines);
      }
    }
    // the block under the pointer
    drawOver(block) {
      if (!this.shapes || this.over === block) return;
      this.over = block;
      this.plot.redraw(false, false);
    }
    hideTip() {
      this.tip.hidden = true;
    }

    placeBrush() {
      const width = this.overviewPlot.over.clientWidth;
      this.brush.style.left = `${(this.view[0] / this.end) * width}px`;
      this.brush.style.width = `${Math.max(6, ((this.view[1] - this.view[0]) / this.end) * width)}px`;
    }
    dragBrush(event) {
      event.preventDefault();
      const over = this.overviewPlot.over;
      const placeOf = (moved) => ((moved.clientX - over.getBoundingClientRect().left) / over.clientWidth) * this.end;
      const grip = event.target.classList.contains("grip") ? (event.target.classList.contains("left") ? 0 : 1) : -1;
      const inside = grip >= 0 || event.target === this.brush;
      if (!inside) {
        const half = Math.min(this.view[1] - this.view[0], this.end / 10) / 2;
        this.setView(placeOf(event) - half, placeOf(event) + half);
      }
      const start = placeOf(event), [from, to] = this.view;
      const move = (moved) => {
        const by = placeOf(moved) - start;
        if (grip === 0) this.setView(Math.max(0, Math.min(from + by, to - SMALLEST_SPAN)), to);
        else if (grip === 1) this.setView(from, Math.min(this.end, Math.max(to + by, from + SMALLEST_SPAN)));
        else this.setView(from + by, to + by);
      };
      const stop = () => {
        over.removeEventListener("pointermove", move);
        over.removeEventListener("pointerup", stop);
        over.removeEventListener("pointercancel", stop);
      };
      over.setPointerCapture(event.pointerId);
      over.addEventListener("pointermove", move);
      over.addEventListener("pointerup", stop);
      over.addEventListener("pointercancel", stop);
    }

    // ---- marks: phases above the plot, the peak and the failure in it

    drawMarks(u) {
      const { ctx, bbox } = u;
      const ratio = uPlot.pxRatio;
      ctx.save();
      this.drawPhases(u, ctx, bbox, ratio);
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      if (this.shapes) this.drawShapes(u, ctx);
      if (this.change) this.drawVeil(u, ctx);
      const { peak, failure, earlier = [] } = this.recording.marks;
      for (const moment of earlier) this.drawMark(u, moment, "", styleOf("--failure"), 2);
      this.drawMark(u, peak.moment, `peak ${formatLike(peak.bytes, u.scales.y.max)}`, styleOf("--ink"), 0);
      if (failure) this.drawMark(u, failure.moment, `out of memory: ${formatLike(failure.requested, u.scales.y.max)} requested`, styleOf("--failure"), 1);
      if (this.change) {
        const column = this.afterTree.within(0, this.recording.count);
        this.drawMark(u, this.recording.moments[column], `with it: ${formatLike(this.after[column], u.scales.y.max)}`, styleOf("--accent"), 3);
      }
      if (this.chosen !== undefined) this.drawMark(u, this.chosen, "", styleOf("--accent"), 2);
      ctx.restore();
    }
    // what is neither drawn nor listed shows behind the shapes
    drawShapes(u, ctx) {
      const { recording, places, shownBins } = this;
      ctx.fillStyle = styleOf("--mixed");
      shownBins.x.forEach((x, i) => {
        const left = u.valToPos(x, "x", true), right = u.valToPos(i + 1 < shownBins.x.length ? shownBins.x[i + 1] : this.view[1], "x", true);
        const top = u.valToPos(this.shown[shownBins.column[i]], "y", true);
        ctx.fillRect(left, top, right - left, u.valToPos(0, "y", true) - top);
      });
      const placeOf = (moment) => Math.max(this.view[0], Math.min(this.view[1], places[Math.max(0, recording.columnOf(Math.min(moment, recording.last)))]));
      placeOf.view = this.view;
      this.shapes.draw(u, ctx, recording, placeOf, this.over);
    }
    // what the change saves is veiled: the part of the stack above the new line
    drawVeil(u, ctx) {
      const bins = this.shownBins;
      ctx.fillStyle = styleOf("--veil");
      bins.x.forEach((x, i) => {
        const bytes = this.shown[bins.column[i]];
        if (bins.after[i] >= bytes) return;
        const left = u.valToPos(x, "x", true), right = u.valToPos(i + 1 < bins.x.length ? bins.x[i + 1] : this.view[1], "x", true);
        const top = u.valToPos(bytes, "y", true);
        ctx.fillRect(left, top - 1, right - left, u.valToPos(bins.after[i], "y", true) - top);
      });
    }
    drawMark(u, moment, label, color, row) {
      const place = this.places[this.recording.columnOf(moment)];
      if (place < this.view[0] || place > this.view[1]) return;
      const { ctx, bbox } = u;
      const ratio = uPlot.pxRatio;
      const x = Math.round(u.valToPos(place, "x", true));
      ctx.strokeStyle = color;
      ctx.lineWidth = (row === 1 ? 2 : 1.25) * ratio;
      ctx.setLineDash(row === 1 ? [] : [4 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (!label) return;
      ctx.setLineDash([]);
      ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
      const wide = ctx.measureText(label).width + 10 * ratio;
      const start = x + wide > bbox.left + bbox.width ? Math.max(bbox.left, x - wide) : x;
      const top = bbox.top + (2 + Math.min(row, 2) * 20) * ratio;
      ctx.fillStyle = styleOf("--card");
      ctx.fillRect(start, top, wide, 18 * ratio);
      ctx.strokeRect(start, top, wide, 18 * ratio);
      ctx.fillStyle = color;
      ctx.textBaseline = "middle";
      ctx.textAlign = "left";
      ctx.fillText(label, start + 5 * ratio, top + 9.5 * ratio);
    }
    drawPhases(u, ctx, bbox, ratio) {
      const { recording, shownBins } = this;
      const spans = [];
      shownBins.x.forEach((x, i) => {
        const [step, phase] = recording.running[recording.ran[shownBins.column[i]]];
        const last = spans[spans.length - 1];
        if (last && last.phase === phase && last.step === step) return;
        if (last) last.end = x;
        spans.push({ phase, step, start: x, end: this.view[1] });
      });
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "middle";
      ctx.textAlign = "center";
      const top = bbox.top - (STRIP + 3) * ratio;
      this.drawSteps(u, ctx, top - STRIP * ratio, ratio);
      for (const span of spans) {
        if (!span.phase) continue;
        const left = u.valToPos(span.start, "x", true), right = u.valToPos(span.end, "x", true);
        ctx.fillStyle = styleOf(`--phase-${span.phase}`);
        ctx.fillRect(left, top, Math.max(ratio, right - left), STRIP * ratio);
        const name = span.phase;
        if (ctx.measureText(name).width + 8 * ratio >= right - left) continue;
        ctx.fillStyle = styleOf("--phase-ink");
        ctx.fillText(name, (left + right) / 2, top + (STRIP * ratio) / 2 + ratio / 2);
      }
    }
    // the number of each step, where there is room
    drawSteps(u, ctx, top, ratio) {
      const { recording, places } = this;
      let free = -Infinity;
      for (const { step, start, end } of recording.steps) {
        const [from, to] = [start, end].map((moment) => Math.max(this.view[0], Math.min(this.view[1], places[recording.columnOf(moment)])));
        if (to <= from) continue;
        const left = u.valToPos(from, "x", true), right = u.valToPos(to, "x", true);
        ctx.fillStyle = styleOf("--muted");
        ctx.fillRect(left, top, ratio, (STRIP - 1) * ratio);
        const name = [`step ${step}`, String(step)].find((text) => ctx.measureText(text).width + 6 * ratio < right - left) || String(step);
        const wide = ctx.measureText(name).width;
        if ((left + right - wide) / 2 < free) continue;
        free = (left + right + wide) / 2 + 4 * ratio;
        ctx.fillText(name, (left + right) / 2, top + STRIP * ratio / 2);
      }
    }
    mark(moment) {
      this.chosen = moment;
      this.plot.redraw(false, false);
    }
  }

  ligerprof.Timeline = Timeline;
})();
