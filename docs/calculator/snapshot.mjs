// Writes what the calculator starts from: the memory of a Python that has imported ligerprof, and the package's files.
// `make calculator` runs it in the site, next to pyodide/ and ligerprof.zip.
import { readFileSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { loadPyodide } from "./pyodide/pyodide.mjs";

const read = (name) => readFileSync(new URL(name, import.meta.url));
const write = (name, content) => writeFileSync(new URL(name, import.meta.url), gzipSync(content, { level: 9 }));

const python = await loadPyodide({ _makeSnapshot: true });
python.unpackArchive(new Uint8Array(read("./ligerprof.zip")).buffer, "zip");
python.FS.writeFile("answer.py", read("./answer.py"));

python.runPython(`
import gc, json, sys
sys.path.insert(0, ".")
sys.dont_write_bytecode = True
import answer
for options in ("--model llama3.2-1b --gpu rtx4090 --batch 1", "--model llama3.2-1b --engine deepspeed --gpus 2 --batch 1"):
    answer.answer(json.dumps({"command": "estimate", "options": options}))
for content in ("model_name_or_path: Qwen/Qwen3-0.6B\\nuse_peft: true\\n", "[model]\\nname = 'llama3'\\n"):
    answer.answer(json.dumps({"command": "estimate", "content": content, "options": "--gpu rtx4090"}))
answer.answer(json.dumps({"command": "advise", "options": "--model llama3.2-1b --gpu h100 --batch 1"}))
gc.collect()
`);
// the memory has the modules that these requests imported
const imported = new Set(python.runPython(`[getattr(module, "__file__", None) for module in sys.modules.values()]`).toJs());
const files = {};
const collect = (folder) => {
  for (const name of python.FS.readdir(folder).filter((each) => !each.startsWith("."))) {
    const path = `${folder}/${name}`;
    if (python.FS.isDir(python.FS.stat(path).mode)) collect(path);
    else if (!imported.has(path)) files[path] = python.FS.readFile(path, { encoding: "utf8" });
  }
};
collect(python.FS.cwd());
write("./memory.bin.gz", python.makeMemorySnapshot());
write("./files.json.gz", JSON.stringify(files));
process.exit(0); // Pyodide keeps node running
