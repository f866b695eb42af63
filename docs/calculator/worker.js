// Runs ligerprof in the browser: Python by Pyodide, from the files beside this one. Nothing leaves the page.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const start = async () => {
  const [python, archive, script] = await Promise.all([
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }),
    fetch(new URL("./ligerprof.zip", import.meta.url)).then((found) => found.arrayBuffer()),
    fetch(new URL("./answer.py", import.meta.url)).then((found) => found.text()),
  ]);
  python.unpackArchive(archive, "zip");
  python.FS.writeFile("answer.py", script);
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
