// Suggested changes: choosing one redraws the timeline with it.
"use strict";
(() => {
  const { element, formatLike } = ligerprof;

  // how exact a saving is, before its figure and before that of the new peak
  const BASES = { replayed: ["", ""], "at least": ["at least ", "at most "], estimated: ["about ", "about "] };

  class WhatIf {
    constructor(host, recording, timeline) {
      this.timeline = timeline;
      // one unit for all
      this.whole = recording.marks.peak.bytes;
      const { failure } = recording.marks;
      this.buttons = [];
      host.append(
        element("h2", {}, failure ? "What would have let it pass" : "What would lower the peak"),
        element("p", { class: "caption" }, "Each is computed by replaying the recording with the change; what is not computed makes a saving \u201cat least\u201d or \u201cabout\u201d. Choose one to see it in the chart; the cheapest come first."),
        element("div", { class: "changes" }, ...recording.whatIfs.map((change) => this.row(change))),
      );
    }

    row(change) {
      const [saving, peak] = BASES[change.basis];
      const effect = change.saves === null ? "saving not computed" : `saves ${saving}${formatLike(change.saves, this.whole)}, new peak ${peak}${formatLike(change.peak, this.whole)}`;
      const verdict = change.letsPass === null ? "" : change.letsPass ? ", enough" : ", not enough alone";
      const button = change.lower && element("button", { type: "button", "aria-pressed": "false", onclick: () => this.choose(button, change) }, "show");
      if (button) {
        button.setAttribute("aria-label", `Show in the chart: ${change.change}`);
        this.buttons.push(button);
      }
      return element(
        "div",
        { class: "suggestion" },
        element("div", {}, button || null, element("strong", {}, ` ${change.change}`), `: ${effect}${verdict}.`),
        element("div", { class: "muted" }, `Cost: ${change.cost}; ${change.costReason}.${change.condition ? ` ${change.condition}.` : ""}`),
        element("pre", {}, change.how.join("\n")),
      );
    }

    choose(button, change) {
      const chosen = button.getAttribute("aria-pressed") !== "true";
      for (const one of this.buttons) one.setAttribute("aria-pressed", String(chosen && one === button));
      this.timeline.tryChange(chosen ? change : null);
    }
  }

  ligerprof.WhatIf = WhatIf;
})();
