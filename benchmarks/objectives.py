"""Objectives of post-training, forward and backward: ours, liger-kernel's, TRL's and plain torch, in turns on one GPU.

Every candidate computes the same loss of the same bf16 hidden states and head; DPO and KTO also score a reference, and
distillation a teacher. A candidate's time is compared with that of the objective's own products (three of the head, and
one for a reference or teacher) right before and after it. Errors are against fp64, at a smaller size. `measure` appends
one JSON line per shape and requires a GPU; `warm` runs only liger-kernel, so that several processes compile its losses
at once; `errors` needs no GPU.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligerprof.kernels.linear_cross_entropy.plan import BALANCED_BYTES
from ligerprof.kernels.objectives import distillation_loss, linear_objective, objective
from ligerprof.kernels.options import LossOptions
from ligerprof.runs.outcome import package_versions

MIB = 2**20
# sequences, positions, hidden, vocabulary
SHAPES = ((4, 1024, 2048, 151936), (4, 1024, 2304, 256000), (4, 2048, 4096, 128256), (8, 512, 1024, 151936))
SMALL = (4, 192, 256, 5000)
SMALL_ON_CPU = (4, 12, 64, 500)
NAMES = ("dpo", "grpo", "kto", "orpo", "simpo", "cpo", "jsd", "forward_kl", "reverse_kl")
BETAS = {"jsd": 0.5, "forward_kl": 0.0, "reverse_kl": 1.0}
KL_WEIGHT = 0.04
WITH_SECOND_HEAD = ("dpo", "kto", *BETAS)
OURS, LIGER, TRL, TORCH = "ligerprof", "liger-kernel", "TRL", "torch"
BOUNDED, EAGER = f"{OURS}, 254 MiB", f"{LIGER}, not compiled"


@dataclass(frozen=True)
class Inputs:
    """Hidden states [B, T, D] and head [V, D] of the policy, and of a reference or teacher; labels [B, T]."""

    hidden: Tensor
    weight: Tensor
    other_hidden: Tensor
    other_weight: Tensor
    labels: Tensor
    advantages: Tensor
    old: Tensor
    ref: Tensor
    desirable: Tensor

    @classmethod
    def random(cls, sizes: tuple[int, int, int, int], device: str, logit_std: float) -> "Inputs":
        sequences, positions, hidden, vocab = sizes
        generator = torch.Generator(device).manual_seed(0)
        normal = functools.partial(torch.randn, generator=generator, device=device)
        labels = torch.randint(vocab, (sequences, positions), generator=generator, device=device)
        labels[:, : positions // 8] = -100
        old = -normal(sequences, positions).abs() - 8
        states = normal(sequences, positions, hidden).bfloat16()
        head = (normal(vocab, hidden) * (logit_std / hidden**0.5)).bfloat16()
        return cls(
            states.clone().requires_grad_(),
            head.clone().requires_grad_(),
            (states + 0.3 * normal(states.shape)).bfloat16(),
            (head + 0.01 * normal(head.shape)).bfloat16(),
            labels,
            normal(sequences),
            old,
            old + 0.1 * normal(old.shape),
            torch.arange(sequences, device=device) % 2 == 0,
        )

    def upcast(self) -> "Inputs":
        wide = [value.detach().double() for value in (self.hidden, self.weight, self.other_hidden, self.other_weight)]
        wide[0].requires_grad_()
        wide[1].requires_grad_()
        return Inputs(*wide, self.labels, self.advantages, self.old, self.ref, self.desirable)

    def data(self, name: str, log_probs: Tensor) -> dict[str, Tensor]:
        """The objective's constants. Old log-probabilities are near those of the policy, so that some ratios clip."""
        if name == "grpo":
            near = log_probs.detach().to(self.old)
            return {
                "advantages": self.advantages,
                "old_log_probs": near + 0.3 * torch.sin(17 * self.old),
                "ref_log_probs": near + 0.2 * torch.sin(31 * self.ref),
            }
        return {"desirable": self.desirable} if name == "kto" else {}


def formula(name: str) -> Any:
    """The settings of every candidate; liger-kernel's defaults but for the weight of the divergence."""
    return objective(name, beta=KL_WEIGHT) if name == "grpo" else objective(name)


def ours(name: str, inputs: Inputs, data: dict[str, Tensor], budget: str | int = "balanced") -> Tensor:
    options = LossOptions(budget=budget)
    heads = (inputs.other_hidden, inputs.other_weight)
    if name in BETAS:
        return distillation_loss(inputs.hidden, inputs.weight, *heads, inputs.labels, options, beta=BETAS[name]).loss
    reference = heads if name in WITH_SECOND_HEAD else None
    args = (inputs.hidden, inputs.weight, inputs.labels, options)
    return linear_objective(formula(name), *args, reference=reference, **data).loss


def liger(name: str, inputs: Inputs, data: dict[str, Tensor], *, compiled: bool) -> Tensor:
    from liger_kernel import chunked_loss as of

    hidden, weight, labels = inputs.hidden, inputs.weight, inputs.labels
    heads = (inputs.other_hidden, inputs.other_weight)
    if name == "jsd":
        loss = of.LigerFusedLinearJSDLoss(0.0, 1.0, 0.5, compiled=compiled)
        states = (hidden.view(-1, hidden.shape[-1]), weight, heads[0].view(-1, heads[0].shape[-1]), heads[1])
        return loss(*states, labels.view(-1))
    if name == "grpo":
        loss = of.LigerFusedLinearGRPOLoss(beta=KL_WEIGHT, use_ref_model=True, loss_type="grpo", compiled=compiled)
        mask = labels != -100
        given = {"ref_per_token_logps": data["ref_log_probs"], "old_per_token_logps": data["old_log_probs"]}
        return loss(hidden, weight, labels.clamp(min=0), mask.float(), data["advantages"], **given)[0]
    if name == "kto":
        loss = of.LigerFusedLinearKTOLoss(use_ref_model=True, compiled=compiled)
        args = {"preference_labels": data["desirable"], "ref_input": heads[0], "ref_weight": heads[1]}
        return loss(hidden, weight, labels, **args)[0]
    if name == "dpo":
        loss = of.LigerFusedLinearDPOLoss(compiled=compiled)
        return loss(weight, hidden, labels, ref_input=heads[0], ref_weight=heads[1])[0]
    made = {
        "orpo": lambda: of.LigerFusedLinearORPOLoss(compiled=compiled),
        "simpo": lambda: of.LigerFusedLinearSimPOLoss(compute_nll_loss=False, compiled=compiled),
        "cpo": lambda: of.LigerFusedLinearCPOLoss(compiled=compiled),
    }
    return made[name]()(weight, hidden, labels)[0]


def of_scores(name: str, inputs: Inputs, score: Callable[[Tensor, Tensor, Tensor], Tensor], data: Any) -> Tensor:
    """The formula in plain torch on log-probabilities that another function computes."""
    mask, own = inputs.labels != -100, formula(name)
    log_probs = score(inputs.hidden, inputs.weight, inputs.labels)
    if name in WITH_SECOND_HEAD:
        with torch.no_grad():
            data = {**data, "ref_log_probs": score(inputs.other_hidden, inputs.other_weight, inputs.labels)}
    return own(log_probs, mask, **own.prepare(mask, data))[0]


def trl(name: str, inputs: Inputs, data: dict[str, Tensor]) -> Tensor:
    if name in BETAS:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

        mask = inputs.labels.view(-1) != -100
        states = (value.reshape(-1, value.shape[-1])[mask] for value in (inputs.hidden, inputs.other_hidden))
        student, teacher = states
        args = (student, inputs.weight, None, teacher, inputs.other_weight, None, BETAS[name])
        return ChunkedDivergenceFunction.apply(*args)[0].mean()
    return of_scores(name, inputs, _trl_scores, data)


def _trl_scores(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    mask = labels != -100
    args = (hidden[mask], weight, None, labels[mask], 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ())
    found = ChunkedLogProbFunction.apply(*args)[0]
    return found.new_zeros(labels.shape).masked_scatter(mask, found)


def plain(name: str, inputs: Inputs, data: dict[str, Tensor]) -> Tensor:
    if name in BETAS:
        from ligerprof.kernels.objectives.distillation import divergence

        log_p, log_q = (
            _wide(hidden @ weight.t()).log_softmax(-1)
            for hidden, weight in ((inputs.hidden, inputs.weight), (inputs.other_hidden, inputs.other_weight))
        )
        mask = inputs.labels != -100
        return torch.where(mask, divergence(log_p, log_q, BETAS[name]), 0.0).sum() / mask.sum()
    return of_scores(name, inputs, _plain_scores, data)


def _plain_scores(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    log_p = _wide(hidden @ weight.t()).log_softmax(-1)
    return log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype == torch.bfloat16 else logits


Candidate = Callable[[str, Inputs, dict[str, Tensor]], Tensor]
CANDIDATES: dict[str, Candidate] = {
    OURS: ours,
    BOUNDED: functools.partial(ours, budget=BALANCED_BYTES),
    LIGER: functools.partial(liger, compiled=True),
    EAGER: functools.partial(liger, compiled=False),
    TRL: trl,
    TORCH: plain,
}


def data_of(name: str, inputs: Inputs) -> dict[str, Tensor]:
    if name != "grpo":
        return inputs.data(name, inputs.old)
    with torch.no_grad():
        return inputs.data(name, _ours_scores(inputs))


def _ours_scores(inputs: Inputs) -> Tensor:
    from ligerprof.kernels.linear_cross_entropy.scores import linear_log_probs

    return linear_log_probs(inputs.hidden, inputs.weight, inputs.labels).log_probs


def with_gradients(run: Candidate, name: str, inputs: Inputs, data: dict[str, Tensor]) -> tuple[Tensor, ...]:
    loss = run(name, inputs, data)
    return (loss.detach(), *torch.autograd.grad(loss, (inputs.hidden, inputs.weight)))


def why(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def measure_errors(device: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Relative errors of the loss and the gradients, by objective and candidate, or the reason why there are none."""
    inputs = Inputs.random(SMALL_ON_CPU if device == "cpu" else SMALL, device, logit_std=3.0)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        data = data_of(name, inputs)
        exact = with_gradients(plain, name, inputs.upcast(), data)
        found[name] = {}
        for candidate, run in CANDIDATES.items():
            # its formulas are the same, and compile for a minute
            if candidate == LIGER:
                continue
            try:
                got = with_gradients(run, name, inputs, data)
                errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)]
                found[name][candidate] = dict(zip(("loss", "d_hidden", "d_weight"), errors, strict=True))
            except Exception as error:  # a peer may raise anything; the others still count
                found[name][candidate] = why(error)
    return found


def timed(run: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


class Products:
    """The products of an objective, on all tokens at once."""

    def __init__(self, inputs: Inputs) -> None:
        self._hidden = inputs.hidden.detach().reshape(-1, inputs.hidden.shape[-1])
        self._weight = inputs.weight.detach()
        self._logits = torch.randn(len(self._hidden), len(self._weight), dtype=torch.bfloat16, device="cuda")
        self._head = torch.empty_like(self._weight)

    def run(self, *, second_head: bool) -> None:
        for _ in range(2 if second_head else 1):
            torch.mm(self._hidden, self._weight.t(), out=self._logits)
        torch.mm(self._logits, self._weight)
        torch.mm(self._logits.t(), self._hidden, out=self._head)


def measure(
    sizes: tuple[int, int, int, int], names: list[str], candidates: list[str], rounds: int
) -> Iterator[dict[str, Any]]:
    inputs = Inputs.random(sizes, "cuda", logit_std=1.3)
    gradient_bytes = sum(value.nbytes for value in (inputs.hidden, inputs.weight))
    for name in names:
        data = data_of(name, inputs)
        ready: dict[str, Callable[[], Any]] = {}
        rows: dict[str, Any] = {}
        for candidate, run in ((who, CANDIDATES[who]) for who in candidates):
            call = functools.partial(with_gradients, run, name, inputs, data)
            if candidate.startswith(LIGER) and name in BETAS and name != "jsd":
                continue
            # only where the compiled one fails
            if candidate == EAGER and "ms" in rows[LIGER]:
                continue
            try:
                call()
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                call()
                extra = torch.cuda.max_memory_allocated() - before - gradient_bytes
                rows[candidate] = {"bytes_beyond_gradients": extra, "ms": [], "share": []}
                ready[candidate] = call
            except Exception as error:
                rows[candidate] = {"reason": why(error)}
                torch.cuda.empty_cache()
        products = Products(inputs)
        floor = functools.partial(products.run, second_head=name in WITH_SECOND_HEAD)
        timed(floor)
        floors = []
        for number in range(rounds):
            order = list(ready.items())
            before_ms = timed(floor)
            for candidate, call in order if number % 2 == 0 else reversed(order):
                ms = timed(call)
                after_ms = timed(floor)
                rows[candidate]["ms"].append(ms)
                rows[candidate]["share"].append((before_ms + after_ms) / 2 / ms)
                floors.append(after_ms)
                before_ms = after_ms
        del products
        torch.cuda.empty_cache()
        summary = {who: round(statistics.median(row["ms"]), 1) for who, row in rows.items() if "ms" in row}
        print(sizes, name, summary, file=sys.stderr, flush=True)
        yield {**made_on(), "sizes": sizes, "objective": name, "candidates": rows, "products_ms": floors}


def made_on() -> dict[str, Any]:
    return {
        "schema": 1,
        "kind": "objectives",
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": dict(package_versions()),
    }


def table_rows(results: Path) -> Iterator[str]:
    yield "| shape | objective | candidate | ms | of its products | times liger-kernel's | MiB beyond gradients |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for line in results.read_text().splitlines():
        row = json.loads(line)
        if "sizes" not in row:
            continue
        candidates = row["candidates"]
        ms = {who: statistics.median(one["ms"]) for who, one in candidates.items() if "ms" in one}
        for who, one in candidates.items():
            what = f"| {' x '.join(map(str, row['sizes']))} | {row['objective']} | {who} |"
            if who not in ms:
                yield f"{what} {one['reason']} | | | |"
                continue
            liger_ms = ms.get(LIGER, ms.get(EAGER))
            against = "-" if liger_ms is None else f"{liger_ms / ms[who]:.2f}"
            share = statistics.median(one["share"])
            yield f"{what} {ms[who]:.1f} | {share:.2f} | {against} | {one['bytes_beyond_gradients'] / MIB:,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "warm", "errors", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", type=int, default=0, help="number of the shape")
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=CANDIDATES)
    arguments = parser.parse_args()
    sizes = SHAPES[arguments.shape]
    if arguments.what == "errors":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        row = {**made_on(), "errors": measure_errors(kind, arguments.names)}
        with arguments.results.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
    elif arguments.what == "warm":
        inputs = Inputs.random(sizes, "cuda", logit_std=1.3)
        for name in arguments.names:
            try:
                with_gradients(CANDIDATES[LIGER], name, inputs, data_of(name, inputs))
            except Exception as error:
                print(sizes, name, why(error), file=sys.stderr, flush=True)
    elif arguments.what == "measure":
        with arguments.results.open("a") as lines:
            for row in measure(sizes, arguments.names, arguments.candidates, arguments.rounds):
                lines.write(json.dumps(row) + "\n")
                lines.flush()
    else:
        for line in table_rows(arguments.results):
            print(line)


if __name__ == "__main__":
    main()
