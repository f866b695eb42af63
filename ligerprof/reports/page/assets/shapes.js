// One shape per allocation over its life, as a layer of the timeline: the largest blocks of a range, stacked by age.
"use strict";
(() => {
  const MOST = 1000;
  const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  class Shapes {
    // blocks: listed blocks that may be drawn; range: first and last moment
    constructor(recording, blocks, range) {
      const { bytes, rounding, from, events } = recording.blocks;
      const size = (block) => bytes[block] + rounding[block];
      const chosen = blocks.filter((block) => recording.livesIn(block, range)).sort((a, b) => size(b) - size(a)).slice(0, MOST);
      this.shapes = new Map();
      const changes = [];
      for (const block of chosen) {
        const end = events[block] < 0 ? Infinity : from[block] + events[block] + 1;
        // an allocation takes effect at the moment after its event
        this.shapes.set(block, { size: size(block), moments: [], bottoms: [], end });
        changes.push([Math.max(from[block] + 1, range[0]), 1, block]);
        if (end <= range[1]) changes.push([end, 0, block]);
      }
      changes.sort((a, b) => a[0] - b[0] || a[1] - b[1] || from[a[2]] - from[b[2]]);
      const stack = [];
      let top = 0;
      for (const [moment, made, block] of changes) {
        const shape = this.shapes.get(block);
        if (made) {
          shape.moments.push(moment);
          shape.bottoms.push(top);
          stack.push(block);
          top += shape.size;
          continue;
        }
        // what is above moves down
        const place = stack.indexOf(block);
        stack.splice(place, 1);
        top -= shape.size;
        for (const above of stack.slice(place)) {
          const moved = this.shapes.get(above);
          const bottom = moved.bottoms[moved.bottoms.length - 1] - shape.size;
          if (moved.moments[moved.moments.length - 1] === moment) moved.bottoms[moved.bottoms.length - 1] = bottom;
          else {
            moved.moments.push(moment);
            moved.bottoms.push(bottom);
          }
        }
      }
    }

    // the block at a height of a moment, -1 if none
    at(moment, bytes) {
      for (const [block, { size, moments, bottoms, end }] of this.shapes) {
        const place = ligerprof.upperBound(moments, moment) - 1;
        if (place >= 0 && moment < end && bytes >= bottoms[place] && bytes < bottoms[place] + size) return block;
      }
      return -1;
    }

    // placeOf: from a moment to a position on the x axis
    draw(u, ctx, recording, placeOf, chosen) {
      const { roleNames, blocks } = recording;
      const [, right] = placeOf.view;
      for (const [block, { size, moments, bottoms, end }] of this.shapes) {
        const role = roleNames[blocks.role[block]];
        const x = moments.map((moment) => u.valToPos(placeOf(moment), "x", true));
        x.push(u.valToPos(end === Infinity ? right : placeOf(end), "x", true));
        const low = bottoms.map((bottom) => u.valToPos(bottom, "y", true)), high = bottoms.map((bottom) => u.valToPos(bottom + size, "y", true));
        ctx.beginPath();
        low.forEach((y, i) => (ctx.lineTo(x[i], y), ctx.lineTo(x[i + 1], y)));
        for (let i = high.length - 1; i >= 0; i--) ctx.lineTo(x[i + 1], high[i]), ctx.lineTo(x[i], high[i]);
        ctx.closePath();
        ctx.fillStyle = styleOf(block === chosen ? "--accent" : `--role-${role}`);
        ctx.fill();
        if (low[0] - high[0] > 3) {
          ctx.strokeStyle = styleOf("--card");
          ctx.lineWidth = 1;
          ctx.stroke();
        }
      }
    }
  }

  ligerprof.Shapes = Shapes;
})();
