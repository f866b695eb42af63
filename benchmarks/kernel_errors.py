"""Errors of the kernels against fp64, by kernel, option and dtype: docs/results/kernel-errors.md.

    python benchmarks/kernel_errors.py

Measures on the GPU, or in Triton's interpreter without one, and writes benchmarks/results/kernel-errors-DEVICE.jsonl;
then writes the page from the files of all devices. Plain torch (the reference in the same dtype) runs next to each
kernel. `--page-only` measures nothing. Takes about two minutes.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs/results/kernel-errors.md"
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
LOSS_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "label smoothing 0.1": {"label_smoothing": 0.1},
    "z-loss 1e-3": {"z_loss": 1e-3},
    "softcap 5": {"softcap": 5.0},
    "logit scale 0.7": {"logit_scale": 0.7},
    "token scaling": {"token_scaling": True},
}
EPS = 1e-5
KERNELS = ("flce", "ce", "rms", "layernorm", "rope", "swiglu", "geglu")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    tokens: int
    hidden: int
    vocab: int


ON_CPU = Sizes(tokens=20, hidden=64, vocab=1000)
ON_GPU = Sizes(tokens=1024, hidden=2048, vocab=32000)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, of the module with a kernel or with its reference.

    Attributes:
        make: float32 inputs with a gradient.
        call: the outputs that have a gradient, by name, from the module and the inputs.
    """

    kernel: str
    option: str
    folder: str
    make: Callable[[], list[Any]]
    call: Callable[..., dict[str, Any]]


def cases(sizes: Sizes, device: Any) -> Iterator[Case]:
    import torch

    from ligerprof.kernels.options import LossOptions

    generator = torch.Generator(device).manual_seed(0)
    tokens, hidden, vocab = sizes.tokens, sizes.hidden, sizes.vocab

    def normal(*shape: int, std: float = 1.0) -> Any:
        return std * torch.randn(shape, device=device, generator=generator)

    labels = torch.randint(0, vocab, (tokens,), device=device, generator=generator)
    labels[::7] = -100

    def case(kernel: str, option: str, folder: str, shapes: list[tuple[int, ...]], call: Any, **stds: float) -> Case:
        def make() -> list[Any]:
            return [normal(*shape, std=stds.get(f"std{place}", 1.0)) for place, shape in enumerate(shapes)]

        return Case(kernel=kernel, option=option, folder=folder, make=make, call=call)

    for title, named in LOSS_OPTIONS.items():
        options = LossOptions(**named)
        yield case(
            "flce",
            title,
            "linear_cross_entropy",
            [(tokens, hidden), (vocab, hidden)],
            lambda m, x, w, o=options: {"loss": m.fused_linear_cross_entropy(x, w, labels.to(x.device), o)},
            std1=2 * hidden**-0.5,
        )
        yield case(
            "ce",
            title,
            "cross_entropy",
            [(tokens, vocab)],
            lambda m, x, o=options: {"loss": m.cross_entropy(x, labels.to(x.device), o)},
            std0=2.0,
        )

    def outputs(m: Any, x: Any, w: Any, b: Any) -> dict[str, Any]:
        more = {"returns": ("lse", "entropy")} if m.__name__.endswith("triton") else {}
        found = m.fused_linear_cross_entropy_outputs(x, w, labels.to(x.device), LossOptions(), b, **more)
        return {"loss": found.loss, "lse": found.lse, "entropy": found.entropy}

    shapes = [(tokens, hidden), (vocab, hidden), (vocab,)]
    yield case("flce", "lse, entropy, bias", "linear_cross_entropy", shapes, outputs, std1=2 * hidden**-0.5)
    rows, width = (tokens, hidden), (hidden,)
    norm = "norm"
    for casting in ("gemma", "llama", "none"):
        yield case(
            "rms",
            f"casting {casting}",
            norm,
            [rows, width],
            lambda m, x, w, c=casting: {"y": m.rms_norm(x, w, EPS, casting=c)},
        )
    yield case("rms", "bias", norm, [rows, width, width], lambda m, x, w, b: {"y": m.rms_norm(x, w, EPS, bias=b)})
    yield case("rms", "no weight", norm, [rows], lambda m, x: {"y": m.rms_norm(x, None, EPS)})
    heads = [(tokens, 4, hidden // 4), (4, hidden // 4)]
    yield case("rms", "a weight per head", norm, heads, lambda m, x, w: {"y": m.rms_norm(x, w, EPS)})
    yield case(
        "rms",
        "with the addition",
        norm,
        [rows, rows, width],
        lambda m, x, r, w: dict(zip(("y", "sum"), m.add_rms_norm(x, r, w, EPS), strict=True)),
    )
    yield case("layernorm", "plain", norm, [rows, width, width], lambda m, x, w, b: {"y": m.layer_norm(x, w, b, EPS)})
    for name in ("swiglu", "geglu"):
        yield case(name, "plain", "gated", [rows, rows], lambda m, g, u, n=name: {"y": getattr(m, n)(g, u)})
        yield case(
            name,
            "multipliers",
            "gated",
            [rows, rows],
            lambda m, g, u, n=name: {"y": getattr(m, n)(g, u, gate_multiplier=0.7, multiplier=1.3)},
        )
    angle = torch.rand(1, tokens, 32, device=device, generator=generator) * 6.28
    for title, named in {"plain": {}, "interleaved": {"interleaved": True}, "partial": {}}.items():
        dim = 48 if title == "partial" else 32

        def rotated(m: Any, q: Any, k: Any, given: Any = named) -> dict[str, Any]:
            cos, sin = (value.to(q) for value in (angle.cos(), angle.sin()))
            return dict(zip(("q", "k"), m.apply_rope(q, k, cos, sin, **given), strict=True))

        yield case("rope", title, "rope", [(1, 4, tokens, dim), (1, 2, tokens, dim)], rotated)


def errors(case: Case, module: Any, values: list[Any], truth: Mapping[str, Any]) -> dict[str, float]:
    """Relative errors (Frobenius norm) of outputs and gradients."""
    found = results(case, module, values)
    return {name: float((found[name].detach().double() - right).norm() / right.norm()) for name, right in truth.items()}


def results(case: Case, module: Any, values: list[Any]) -> dict[str, Any]:
    import torch

    inputs = [value.clone().requires_grad_() for value in values]
    outputs = case.call(module, *inputs)
    generator = torch.Generator().manual_seed(1)
    grads = [
        # of the size of a mean's for one number, and of a token's share for a row of results
        torch.ones((), dtype=torch.float64).to(value)
        if value.ndim == 0
        else torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        for value in outputs.values()
    ]
    made = torch.autograd.grad(list(outputs.values()), inputs, grads)
    return {**outputs, **{f"d_input_{place}": value for place, value in enumerate(made)}}


def measure() -> tuple[str, list[dict[str, Any]]]:
    import importlib

    import torch

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    where = torch.cuda.get_device_name() if has_gpu else "CPU, Triton's interpreter"
    import triton

    rows = []
    for case in cases(ON_GPU if has_gpu else ON_CPU, device):
        modules = {
            provider: importlib.import_module(f"ligerprof.kernels.{case.folder}.{module}")
            for provider, module in (("ligerprof", "triton"), ("torch", "reference"))
        }
        wide = case.make()
        for title, name in DTYPES.items():
            values = [value.to(getattr(torch, name)) for value in wide]
            truth = {
                key: value.detach()
                for key, value in results(case, modules["torch"], [value.double() for value in values]).items()
            }
            for provider, module in modules.items():
                found = errors(case, module, values, truth)
                row = {"kernel": case.kernel, "option": case.option, "dtype": title, "provider": provider}
                rows.append({**row, "errors": {key: float(f"{value:.3g}") for key, value in found.items()}})
    about = {"device": where, "torch": torch.__version__.split("+")[0], "triton": triton.__version__}
    return where, [about, *rows]


def write_page(files: Iterable[Path]) -> str:
    lines = [
        "# Errors of the kernels against fp64",
        "",
        "Largest relative error (Frobenius norm of the difference over that of the truth) of a kernel's outputs and",
        "gradients, by kernel, option and dtype. The truth is the plain-torch reference in fp64 on the same rounded",
        "inputs. Next to each error is that of the reference itself in the same dtype.",
        "",
        "`python benchmarks/kernel_errors.py` measures on the machine that it runs on, in two minutes, and writes",
        "this page from `benchmarks/results/kernel-errors-*.jsonl`.",
    ]
    for path in files:
        about, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        lines += ["", f"## {about['device']}", "", f"torch {about['torch']}, triton {about['triton']}."]
        if "interpreter" in about["device"]:
            lines += ["The interpreter truncates to bf16, where a GPU rounds to nearest: its bf16 errors are up to"]
            lines += ["twice as large. Products and plain torch run as on any CPU."]
        lines += ["", f"| kernel | option | {' | '.join(f'{name} | torch' for name in DTYPES)} | largest in |"]
        lines += ["|---|---|" + "---:|" * (2 * len(DTYPES)) + "---|"]
        table: dict[tuple[str, str], dict[tuple[str, str], dict[str, float]]] = {}
        for row in rows:
            key = (row["kernel"], row["option"])
            table.setdefault(key, {})[row["dtype"], row["provider"]] = row["errors"]
        # the options of a kernel together, in the order in which they were measured
        for (kernel, option), found in sorted(table.items(), key=lambda item: KERNELS.index(item[0][0])):
            cells = [
                f"{max(found[dtype, provider].values()):.1e}" for dtype in DTYPES for provider in ("ligerprof", "torch")
            ]
            own = found["bf16", "ligerprof"]
            lines.append(f"| {kernel} | {option} | {' | '.join(cells)} | {max(own, key=lambda name: own[name])} |")
    lines += [
        "",
        "`largest in` is the output or gradient (`d_input_1`: of the second input) with the largest bf16 error.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="Folder of the result files.")
    parser.add_argument("--page", type=Path, default=PAGE, help="The page to write.")
    parser.add_argument("--page-only", action="store_true", help="Write the page from the files that exist.")
    arguments = parser.parse_args()
    if not arguments.page_only:
        import torch

        if not torch.cuda.is_available():
            # before Triton is imported
            os.environ["TRITON_INTERPRET"] = "1"
        where, rows = measure()
        name = "cpu" if "interpreter" in where else "-".join(where.lower().replace("nvidia", "").split())
        file = arguments.results / f"kernel-errors-{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    page = write_page(sorted(arguments.results.glob("kernel-errors-*.jsonl")))
    arguments.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
