// Unpacks a recording, and answers what was held at a moment. Text of a recording reaches the page as text only.
"use strict";
const ligerprof = {};
(() => {
  const KIB = 1024, MIB = KIB * 1024, GIB = MIB * 1024;
  const number = new Intl.NumberFormat("en-US");

  // Save rows as a CSV file; a spreadsheet must not take text of a recording for a formula.
  const saveCsv = (name, rows) => {
    const cell = (value) => {
      const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
      return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const text = rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
    const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    return text;
  };
  const csvButton = (name, rows) => element("button", { type: "button", title: "Save these rows as a CSV file", onclick: () => saveCsv(name, rows()) }, "CSV");

  // bytes in the unit of another size, as the command prints them: see format_like in units.py
  const formatLike = (bytes, other) => {
    const size = Math.abs(bytes);
    if (size >= (Math.max(Math.abs(other), ligerprof.largest) >= 10 * GIB ? GIB / 10 : 10 * GIB)) return (bytes / GIB).toFixed(2) + " GiB";
    return size >= MIB ? formatMib(bytes) : size >= 10 * KIB ? (bytes / KIB).toFixed(1) + " KiB" : bytes + " B";
  };
  // a page has one unit, that of its largest size
  ligerprof.largest = 0;
  const formatBytes = (bytes) => formatLike(bytes, 0);
  // for columns of tables
  const formatMib = (bytes) => (Math.abs(bytes) >= MIB ? (bytes / MIB).toFixed(1) + " MiB" : formatBytes(bytes));

  // bytes of text such as "1 MiB"; 0 if it is not a size
  const parseBytes = (text) => {
    const [, value, unit] = /^\s*([\d.]+)\s*([kmg]?)/i.exec(text) || [0, 0, ""];
    return Number(value) * { "": 1, k: KIB, m: MIB, g: GIB }[unit.toLowerCase()] || 0;
  };

  const formatTime = (us, span = us) => {
    if (Math.abs(span) >= 1e6) return (us / 1e6).toFixed(Math.abs(span) >= 1e7 ? 2 : 3) + " s";
    if (Math.abs(span) >= 1e3) return (us / 1e3).toFixed(Math.abs(span) >= 1e4 ? 2 : 3) + " ms";
    return Math.round(us) + " µs";
  };

  const formatShare = (part, whole) => (whole ? ((100 * part) / whole).toFixed(1) : "0.0") + " %";

  // an element with text, attributes and children; never markup
  const element = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") made.className = value;
      else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  };

  // differences of successive values as zigzag varints
  const readColumn = (bytes, at, count) => {
    const values = new Float64Array(count);
    for (let i = 0, sum = 0; i < count; i++) {
      let value = 0;
      let scale = 1;
      for (;;) {
        const byte = bytes[at++];
        value += (byte & 127) * scale;
        if (byte < 128) break;
        scale *= 128;
      }
      sum += value % 2 ? -(value + 1) / 2 : value / 2;
      values[i] = sum;
    }
    return values;
  };

  const unpack = async (text) => {
    const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    const length = new DataView(bytes.buffer).getUint32(0, true);
    const columns = bytes.subarray(4 + length);
    const values = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
    const column = (reference) => readColumn(columns, reference.at, reference.count);
    return { values, column };
  };

  // index of the first value above `value` in ascending values
  const upperBound = (values, value, low = 0, high = values.length) => {
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (values[middle] <= value) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  const lowerBound = (values, value, low = 0, high = values.length) => {
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (values[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  };

  // finds the place of the extreme value in any range, by a tree of winners: each level halves the columns
  class Extremes {
    constructor(values, better) {
      this.values = values;
      this.better = better;
      const count = (this.count = values.length);
      this.tree = new Int32Array(2 * count);
      for (let i = 0; i < count; i++) this.tree[count + i] = i;
      for (let i = count - 1; i > 0; i--) this.tree[i] = this.pick(this.tree[2 * i], this.tree[2 * i + 1]);
    }
    // of equal values, the earlier one
    pick(a, b) {
      const first = Math.min(a, b), second = Math.max(a, b);
      return this.better(this.values[second], this.values[first]) ? second : first;
    }
    within(start, end) {
      let found = start;
      for (let low = start + this.count, high = end + this.count; low < high; low >>= 1, high >>= 1) {
        if (low & 1) found = this.pick(found, this.tree[low++]);
        if (high & 1) found = this.pick(found, this.tree[--high]);
      }
      return found;
    }
  }

  // one recording: columns over time, listed blocks, call sites
  class Recording {
    constructor(values, column) {
      const { timeline, blocks } = values;
      this.title = values.title;
      this.marks = values.marks;
      this.last = timeline.last;
      this.starts = column(timeline.starts);
      this.moments = column(timeline.moments);
      this.count = this.starts.length;
      this.times = timeline.times && column(timeline.times);
      this.lowest = column(timeline.lowest);
      this.reserved = column(timeline.reserved);
      this.roles = timeline.roles.map((role) => ({ name: role.name, meaning: role.meaning, bytes: column(role.bytes) }));
      this.running = timeline.running;
      this.ran = column(timeline.ran);
      this.roleNames = values.roles;
      this.phaseNames = values.phases;
      this.leastBytes = values.leastBytes;
      this.allBlocks = values.allBlocks;
      this.frames = values.frames;
      this.stacks = readLists(column, values.stacks);
      this.sites = values.sites.map(([module, frame, node, operation, stack]) => ({ module, frame, node, operation, stack }));
      this.keepers = values.keepers.map(([name, place]) => ({ name, place }));
      this.blocks = {
        bytes: column(blocks.bytes),
        role: column(blocks.role),
        site: column(blocks.site),
        keeper: column(blocks.keeper),
        layer: column(blocks.layer),
        phase: column(blocks.phase),
        step: column(blocks.step),
        from: column(blocks.from),
        events: column(blocks.events),
        startTime: blocks.times && column(blocks.times[0]),
        lifeTime: blocks.times && column(blocks.times[1]),
        address: column(blocks.address),
        rounding: column(blocks.rounding),
        // events from the release to its completion
        waits: column(blocks.waits),
      };
      const [numbers, starts] = values.steps;
      this.steps = numbers.map((step, i) => ({ step, start: starts[i], end: i + 1 < starts.length ? starts[i + 1] : this.last }));
      this.opens = values.opens;
      const { names, first, actions, sizes, addresses } = values.events;
      this.events = { names, first, actions: column(actions), sizes: column(sizes), addresses: column(addresses) };
      this.mapped = values.mapped.map(column);
      this.before = values.before.map(column);
      this.segments = values.segments ? values.segments.map((one) => readSegments(one, column)) : [];
      this.whatIfs = values.whatIfs.map((one) => ({ ...one, lower: one.lower && column(one.lower) }));
      this.total = new Float64Array(this.count);
      for (const role of this.roles) for (let i = 0; i < this.count; i++) this.total[i] += role.bytes[i];
      // where each column starts, and the end of the last
      this.eventPlaces = Float64Array.from({ length: this.count + 1 }, (_, i) => (i < this.count ? this.starts[i] : this.last + 1));
    }
    get hasTimes() {
      return this.times !== null;
    }
    // the column that contains a moment
    columnOf(moment) {
      return upperBound(this.starts, moment) - 1;
    }
    // indices of the listed blocks that are live at a moment
    liveAt(moment) {
      const { from, events } = this.blocks;
      const live = [];
      for (let i = 0; i < from.length; i++) {
        if (from[i] < moment && (events[i] < 0 || from[i] + events[i] >= moment)) live.push(i);
      }
      return live;
    }
    // the number of the step of a moment, 0 before the first
    stepAt(moment) {
      const place = upperBound(this.steps.map(({ start }) => start), moment) - 1;
      return place < 0 ? 0 : this.steps[place].step;
    }
    // whether a block is live somewhere in a range of moments
    livesIn(block, [from, to]) {
      const { from: made, events } = this.blocks;
      return made[block] < to && (events[block] < 0 || made[block] + events[block] >= from);
    }
    // The listed blocks of a scope: at a moment, or of a range of moments.
    blocksOf(scope, moment, [from, to]) {
      if (scope === "live") return this.liveAt(moment);
      let end = to;
      // what lives through a whole step after its own, without what the first step makes to stay
      if (scope === "leaks") [from, to, end] = [this.steps[1], this.steps[this.steps.length - 2], this.steps[this.steps.length - 1]].map(({ start }) => start);
      const { from: made, events } = this.blocks;
      const found = [];
      for (let i = 0; i < made.length; i++) {
        if (made[i] >= from && made[i] < to && (scope === "made" || events[i] < 0 || made[i] + events[i] >= end)) found.push(i);
      }
      return found;
    }
    get hasLeaks() {
      return this.steps.length > 3;
    }
    // Segments at any moment: those of marked moments from the file, others rebuilt from the events.
    segmentsAt(moment) {
      return this.segments.find((one) => one.moment === moment) || rebuildSegments(this, moment);
    }
    // Every listed event: its index, action, size and address, and the listed block that it allocates or frees.
    get eventRows() {
      if (this.rows) return this.rows;
      const { names, first, actions, sizes, addresses } = this.events, { from, events, waits, bytes, address } = this.blocks;
      const blockOf = new Map();
      for (let i = 0; i < from.length; i++) {
        if (from[i] >= 0) blockOf.set(from[i], i);
        if (events[i] < 0) continue;
        blockOf.set(from[i] + events[i], i);
        if (waits[i]) blockOf.set(from[i] + events[i] + waits[i], i);
      }
      let rest = 0;
      this.rows = Array.from(actions, (action, i) => {
        const block = blockOf.get(first + i);
        return block === undefined
          ? { index: first + i, action: names[action], bytes: sizes[rest], address: addresses[rest++], block: -1 }
          : { index: first + i, action: names[action], bytes: bytes[block], address: address[block], block };
      });
      return this.rows;
    }
    // bytes by role at the moment that a column shows
    bytesAt(column) {
      return new Map(this.roles.map((role) => [role.name, role.bytes[column]]));
    }
    frameText(index) {
      const [file, line, name] = this.frames[index];
      return `${file}${line > 0 && line < 2 ** 31 ? ":" + line : ""} ${name}`;
    }
    // the stack of a call site, innermost first
    stackOf(site) {
      return this.stacks[this.sites[site].stack].map((frame) => this.frameText(frame));
    }
    // when a moment was, as text
    timeText(column) {
      return this.hasTimes ? formatTime(this.times[column], this.times[this.count]) : `event ${number.format(this.moments[column])}`;
    }
    // what keeps a block, as text; empty if the recording does not show it
    keptText(block) {
      const { name, place } = this.keepers[this.blocks.keeper[block]];
      if (!name) return "";
      if (name === "checkpoint") return "kept as the input of a checkpointed layer";
      if (name === "Python") return `kept by a variable of the program${place ? `, released in ${place}` : ""}`;
      return `kept for backward by ${name}${place ? ` of ${place}` : ""}`;
    }
    // how long a block lived, as text
    lifeText(block) {
      const { events, startTime, lifeTime, from } = this.blocks;
      const start = from[block] < 0 ? "from before the recording" : startTime ? `from ${formatTime(startTime[block], this.times[this.count])}` : `from event ${number.format(from[block])}`;
      if (events[block] < 0) return `${start} to the end of the recording`;
      const life = lifeTime ? formatTime(lifeTime[block]) : `${number.format(events[block])} events`;
      return `${start}, for ${life}`;
    }
  }

  // The segments of a moment; a piece has its size and the listed block in it, or says what else it is.
  const KINDS = ["free", "waiting for another stream", "smaller blocks"];
  const readSegments = (values, column) => {
    const lengths = column(values.lengths), sizes = column(values.sizes), kinds = column(values.kinds);
    let at = 0;
    const segments = values.segments.map(([address, small, stream, pool], index) => {
      const pieces = Array.from({ length: lengths[index] }, (_, i) => {
        const kind = kinds[at + i];
        return { size: sizes[at + i], kind: kind < KINDS.length ? KINDS[kind] : "block", block: kind < KINDS.length ? -1 : kind - KINDS.length };
      });
      at += lengths[index];
      return segmentOf(address, pieces, { small, stream, pool });
    });
    const [count, bytes, freeBytes] = values.rest;
    return { moment: values.moment, segments, rest: { count, bytes, free: freeBytes } };
  };

  const segmentOf = (address, pieces, more = {}) => {
    const free = pieces.filter((piece) => piece.kind === "free");
    const sum = (chosen) => chosen.reduce((bytes, piece) => bytes + piece.size, 0);
    return { ...more, address, pieces, size: sum(pieces), free: sum(free), largest: Math.max(0, ...free.map((piece) => piece.size)) };
  };

  // Ranges of memory from the events of segments, with the blocks in them; unlisted blocks look like free memory.
  const rebuildSegments = (recording, moment) => {
    const [addresses, sizes] = recording.before, [at, actions, starts, lengths] = recording.mapped, { names } = recording.events;
    const ranges = new Map();
    addresses.forEach((address, i) => ranges.set(address, address + sizes[i]));
    for (let i = 0; i < at.length && at[i] < moment; i++) {
      const start = starts[i], end = start + lengths[i], action = names[actions[i]];
      if (action === "segment_alloc") ranges.set(start, end);
      else if (action === "segment_map") {
        // ranges of one expandable segment join
        const before = [...ranges].find(([, stop]) => stop === start), after = ranges.get(end);
        ranges.delete(end);
        ranges.set(before ? before[0] : start, after || end);
      } else {
        const [low, high] = [...ranges].find(([low, high]) => low <= start && start < high) || [start, end];
        ranges.delete(low);
        if (low < start) ranges.set(low, start);
        if (end < high) ranges.set(end, high);
      }
    }
    const { from, events, waits, address, bytes, rounding } = recording.blocks;
    const held = [];
    for (let i = 0; i < from.length; i++) {
      if (from[i] >= moment) continue;
      const freed = events[i] < 0 ? Infinity : from[i] + events[i];
      if (freed >= moment) held.push([address[i], bytes[i] + rounding[i], "block", i]);
      else if (!waits[i] || freed + waits[i] >= moment) held.push([address[i], bytes[i] + rounding[i], KINDS[1], -1]);
    }
    held.sort((a, b) => a[0] - b[0]);
    let next = 0;
    const segments = [...ranges].sort((a, b) => a[0] - b[0]).map(([start, end]) => {
      const pieces = [];
      let place = start;
      const free = (stop) => stop > place && pieces.push({ size: stop - place, kind: "free", block: -1 });
      while (next < held.length && held[next][0] < start) next++;
      for (; next < held.length && held[next][0] < end; next++) {
        const [low, size, kind, block] = held[next];
        free(low);
        pieces.push({ size, kind, block });
        place = low + size;
      }
      free(end);
      return segmentOf("0x" + start.toString(16), pieces);
    });
    return { moment, segments, rest: { count: 0, bytes: 0, free: 0 } };
  };

  const readLists = (column, [lengths, members]) => {
    const counts = column(lengths), all = column(members);
    const lists = [];
    let at = 0;
    for (const count of counts) lists.push(Array.from(all.subarray(at, (at += count))));
    return lists;
  };

  Object.assign(ligerprof, {
    KIB, MIB, GIB, number, formatBytes, formatLike, formatMib, formatTime, formatShare, parseBytes, element, saveCsv, csvButton, unpack, upperBound, lowerBound, Extremes, Recording, readLists,
  });
})();
