// Runs ligerprof in the browser: Python by Pyodide, from the files beside this one. Nothing leaves the page.
import { loadPyodide } from "./pyodide/pyodide.mjs";
import createPyodideModule from "./pyodide/pyodide.asm.mjs";

const unpacked = async (name) => {
  const { body } = await fetch(new URL(name, import.meta.url));
  return new Response(body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
};
const load = (options) => loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href, ...options });

const start = async () => {
  // the memory of a Python that has imported ligerprof, and the other files of the package: snapshot.mjs
  const memory = unpacked("./memory.bin.gz"), files = unpacked("./files.json.gz");
  const restored = load({
    _loadSnapshot: memory,
    createPyodideModule: async (settings) => {
      const module = await createPyodideModule(settings);
      // the memory is written over this one, which has to be as large
      module._malloc((await memory).byteLength);
      return module;
    },
  });
  const python = await restored.catch((error) => {
    console.warn(`Python starts anew, for the memory cannot be restored: ${error}`);
    return load();
  });
  const entries = Object.entries(JSON.parse(new TextDecoder().decode(await files))), encoder = new TextEncoder();
  for (const folder of new Set(entries.map(([path]) => path.slice(0, path.lastIndexOf("/"))))) python.FS.mkdirTree(folder);
  for (const [path, text] of entries) python.FS.writeFile(path, encoder.encode(text), { canOwn: true });
  python.runPython("import sys; sys.path.insert(0, '.')");
  return python.pyimport("answer").answer;
};

const ready = start();
ready.then(() => postMessage({ ready: true }), (error) => postMessage({ failed: String(error) }));
onmessage = async ({ data }) => {
  try {
    const answer = await ready;
    postMessage({ number: data.number, text: answer(JSON.stringify(data.request)) });
  } catch (error) {
    postMessage({ number: data.number, failed: String(error) });
  }
};
