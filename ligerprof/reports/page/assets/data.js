// Unpacks a recording, and answers what was held at a moment. Text of a recording reaches the page as text only.
"use strict";
const ligerprof = {};
(() => {
  const KIB = 1024, MIB = KIB * 1024, GIB = MIB * 1024;
  const number = new Intl.NumberFormat("en-US");

  // bytes as text, as the command prints them: see format_bytes in units.py
  const formatBytes = (bytes) => {
    const size = Math.abs(bytes);
    if (size >= 10 * GIB) return (bytes / GIB).toFixed(2) + " GiB";
    if (size >= MIB) return (bytes / MIB).toFixed(1) + " MiB";
    if (size >= 10 * KIB) return (bytes / KIB).toFixed(1) + " KiB";
    return bytes + " B";
  };

  // in the unit of another size in the same sentence: see format_like in units.py
  const formatLike = (bytes, other) => {
    const size = Math.abs(bytes);
    if (Math.abs(other) >= 10 * GIB && size >= GIB / 10) return (bytes / GIB).toFixed(2) + " GiB";
    if (Math.abs(other) >= MIB && Math.abs(other) < 10 * GIB && size >= MIB) return (bytes / MIB).toFixed(1) + " MiB";
    return formatBytes(bytes);
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
      };
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
      const sum = (chosen) => chosen.reduce((bytes, piece) => bytes + piece.size, 0);
      const free = pieces.filter((piece) => piece.kind === "free");
      return { address, small, stream, pool, pieces, size: sum(pieces), free: sum(free), largest: Math.max(0, ...free.map((piece) => piece.size)) };
    });
    const [count, bytes, freeBytes] = values.rest;
    return { moment: values.moment, segments, rest: { count, bytes, free: freeBytes } };
  };

  const readLists = (column, [lengths, members]) => {
    const counts = column(lengths), all = column(members);
    const lists = [];
    let at = 0;
    for (const count of counts) lists.push(Array.from(all.subarray(at, (at += count))));
    return lists;
  };

  Object.assign(ligerprof, {
    KIB, MIB, GIB, number, formatBytes, formatLike, formatTime, formatShare, element, unpack, upperBound, lowerBound, Extremes, Recording, readLists,
  });
})();
