// The form of the calculator, and what `ligerprof estimate` and `advise` answer. Text reaches the page as text only.
const form = document.querySelector("#calculator-form"), output = document.querySelector("#calculated"), state = document.querySelector("#calculator-state");
const FIELDS = ["content", "file", "model", "gpu", "gpus", "batch", "seq", "options"];
const GIB = 2 ** 30, MIB = 2 ** 20;

const element = (tag, attributes, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
};
const size = (bytes) => (bytes >= GIB / 10 ? `${(bytes / GIB).toFixed(2)} GiB` : `${(bytes / MIB).toFixed(1)} MiB`);
const list = (title, lines) => (lines.length ? element("div", {}, element("h3", {}, title), element("ul", {}, ...lines.map((line) => element("li", {}, line)))) : null);

let worker = null, number = 0;
const waiting = new Map();
const missing = (why) => {
  state.textContent = `The calculator cannot start: ${why}. \`make calculator\` puts its Python beside this page; serve the site over HTTP. \`ligerprof estimate\` answers the same in a terminal.`;
};
const started = () => {
  if (worker) return;
  if (location.protocol === "file:") return missing("a browser runs no workers from a file");
  state.textContent = "Python is loading …";
  worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  worker.onerror = () => missing("its files are not there");
  worker.onmessage = ({ data }) => {
    if (data.ready) state.textContent = "Ready. Nothing that you enter leaves this page.";
    else if (data.number === undefined) missing(data.failed);
    else {
      const { resolve, reject } = waiting.get(data.number);
      waiting.delete(data.number);
      data.failed ? reject(new Error(data.failed)) : resolve(JSON.parse(data.text));
    }
  };
};
const ask = (request) => new Promise((resolve, reject) => {
  waiting.set(++number, { resolve, reject });
  worker.postMessage({ number, request });
});

const values = () => Object.fromEntries(FIELDS.map((name) => [name, form.elements[name].value.trim()]).filter(([, value]) => value));
const requestOf = (given) => {
  const named = ["model", "gpu", "gpus", "batch", "seq"].filter((name) => given[name]).map((name) => `--${name} '${given[name].replaceAll("'", "")}'`);
  return { content: given.content || "", file: given.file || "", options: [...named, given.options || ""].join(" ") };
};
const encode = (given) => btoa(String.fromCharCode(...new TextEncoder().encode(JSON.stringify(given)))).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
const decode = (text) => JSON.parse(new TextDecoder().decode(Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0))));

const bars = (roles, limit) => {
  const held = Object.keys(roles).filter((name) => roles[name] > 0);
  const total = held.reduce((sum, name) => sum + roles[name], 0), whole = Math.max(total, limit || 0);
  const bar = element("div", { class: "calculator-bar", role: "img", "aria-label": `${size(total)} by role` });
  for (const name of held) {
    const part = element("i", { title: `${name} ${size(roles[name])}` });
    part.style.width = `${(100 * roles[name]) / whole}%`;
    part.style.background = `var(--role-${name})`;
    bar.append(part);
  }
  if (limit) {
    const line = element("b", { title: `limit ${size(limit)}` });
    line.style.left = `${(100 * limit) / whole}%`;
    bar.append(line);
  }
  const rows = held.sort((a, b) => roles[b] - roles[a]).map((name) => {
    const swatch = element("i", { class: "calculator-swatch" });
    swatch.style.background = `var(--role-${name})`;
    return element("tr", {}, element("td", {}, swatch, name), element("td", {}, size(roles[name])), element("td", {}, `${((100 * roles[name]) / total).toFixed(1)} %`));
  });
  return [bar, element("table", {}, element("tbody", {}, ...rows, element("tr", {}, element("th", {}, "total"), element("th", {}, size(total)), element("th", {}, ""))))];
};

const shown = ({ result, said }) => {
  const problems = said.filter((line) => /^(Error|Usage|Note)|unknown|not read/.test(line));
  if (!result) return [element("p", { class: "calculator-bad" }, problems.join(" ") || said.join(" "))];
  const verdict = result.verdict ? `${result.verdict}${result.limit_bytes ? ` in ${size(result.limit_bytes)} (${result.limit_source})` : ""}` : "no limit chosen";
  return [
    element("p", { class: `calculator-verdict ${result.fits === false ? "calculator-bad" : ""}` }, `${size(result.peak_bytes)} in ${result.peak_phase}, about ${size(result.reserved_bytes || result.peak_bytes)} reserved: ${verdict}.`),
    ...bars(result.roles, result.limit_bytes),
    element("h3", {}, "Formula"),
    element("table", {}, element("tbody", {}, ...result.terms.map((term) => element("tr", {}, element("td", {}, term.name), element("td", {}, element("code", {}, term.formula)), element("td", {}, size(term.bytes)))))),
    list("Assumed", result.assumed),
    list("Left out", result.left_out),
    list("Said", said.filter((line) => !line.startsWith("assumed:") && !line.startsWith("Error"))),
  ];
};
const changes = ({ result, said }) => {
  if (!result) return [element("p", {}, said.join(" "))];
  const applied = result.steps.filter((step) => step.state === "applied"), spare = result.steps.filter((step) => step.state === "spare");
  const line = (step) => `${step.name}: saves ${size(step.saved_bytes)}, ${size(step.needed_bytes)} needed; ${step.cost}`;
  const edited = (result.edits || (result.edit ? [result.edit] : [])).flatMap((edit) => edit.changes.map((change) => [`${change.old === null ? "" : `- ${change.key}: ${JSON.stringify(change.old)}\n`}+ ${change.key}: ${JSON.stringify(change.new)}`]));
  return [
    element("p", {}, applied.length ? "The cheapest changes that make it fit:" : result.verdict.fits === false ? "No change of the ladder makes it fit." : "Nothing needs to change."),
    applied.length ? element("ul", {}, ...applied.map((step) => element("li", {}, line(step)))) : null,
    edited.length ? element("pre", { class: "calculator-lines" }, edited.join("\n")) : null,
    list("What would help, too", spare.map(line)),
  ];
};

const compute = async () => {
  started();
  if (!worker) return;
  const given = values(), request = requestOf(given);
  history.replaceState(null, "", `#${encode(given)}`);
  state.textContent = "Computing …";
  const asked = (output.dataset.asked = String(number + 1));
  delete output.dataset.done;
  try {
    const estimated = await ask({ command: "estimate", ...request });
    if (output.dataset.asked !== asked) return;
    output.replaceChildren(...shown(estimated).filter(Boolean));
    output.dataset.estimate = JSON.stringify(estimated);
    // since the page was opened
    output.dataset.ms ??= Math.round(performance.now());
    if (estimated.result && estimated.result.limit_bytes) {
      state.textContent = "Looking for the cheapest changes …";
      const advised = await ask({ command: "advise", ...request });
      if (output.dataset.asked !== asked) return;
      output.append(element("h3", {}, "Changes"), ...changes(advised).filter(Boolean));
      output.dataset.advise = JSON.stringify(advised);
    }
    state.textContent = "Done. The address of this page has the recipe: copy it to share.";
  } catch (error) {
    state.textContent = `It failed: ${error.message}`;
  }
  output.dataset.done = "yes";
};

form.addEventListener("submit", (event) => {
  event.preventDefault();
  compute();
});
const content = form.elements.content;
content.addEventListener("dragover", (event) => event.preventDefault());
content.addEventListener("drop", async (event) => {
  const [file] = event.dataTransfer.files;
  if (!file) return;
  event.preventDefault();
  content.value = await file.text();
  form.elements.file.value = file.name;
  compute();
});
const open = () => {
  try {
    const given = decode(location.hash.slice(1));
    for (const name of FIELDS) form.elements[name].value = given[name] || "";
    compute();
  } catch {
    state.textContent = "The link has no recipe that this page can read.";
  }
};
addEventListener("hashchange", open);
if (location.hash.length > 8) open();
else form.addEventListener("focusin", started, { once: true });
form.dataset.ready = "yes";
