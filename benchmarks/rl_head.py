"""Time log-probabilities and entropies of a large head with their gradients: ligerprof, liger-kernel, TRL, torch.

    python benchmarks/rl_head.py measure benchmarks/results/rl-head-h200.jsonl
    python benchmarks/rl_head.py table benchmarks/results/rl-head-h200.jsonl

The loss is a policy gradient: each token's log-probability times its advantage, plus its entropy times a coefficient.
Each run is compared with the three products right before and after it (`ligerprof.runs.bench.accuracy`); intervals are
of the median over turns. liger-kernel's chunked losses compute no entropy, so each
candidate runs without entropies, too. Errors are against fp64 on the logits of a smaller head, which are far from
uniform. `measure` requires a GPU and appends one JSON line; `measure --device cpu` prints the errors alone, from the
interpreter of Triton.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from turns import Contest, Turns, compare_in_turns, median_interval

from ligerprof.kernels.linear_cross_entropy.scores import linear_log_probs, log_probs
from ligerprof.kernels.options import LossOptions
from ligerprof.runs.outcome import package_versions

MIB = 2**20
SEQUENCES, SEQ, HIDDEN, VOCAB = 8, 1024, 4096, 151936
# enough for every candidate's chunks to end in the middle, and for fp64 logits on a CPU
SMALL = (2, 384, 512, 9000)
TEMPERATURE, ENTROPY_WEIGHT = 0.9, 0.01
CHUNK_TOKENS = 512
LARGE_BUDGET_BYTES = 5 * 2**29
TURNS = Turns(rounds=5)
FLOOR = "three products"
BUDGET_MIB, SPEEDUP = 256, 2.0
OURS, LIGER = "ligerprof", "liger-kernel, chunked GRPO"
# what that loss consists of, if torch.compile cannot compile the rest
LIGER_SCORES = "liger-kernel, its log-probabilities"


@dataclass(frozen=True)
class Inputs:
    """Hidden states [B, T, D], head [V, D], labels and advantages [B, T]."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    advantages: Tensor

    @classmethod
    def random(cls, sizes: tuple[int, int, int, int], device: str, logit_std: float) -> "Inputs":
        sequences, seq, hidden, vocab = sizes
        generator = torch.Generator(device).manual_seed(0)
        normal = functools.partial(torch.randn, generator=generator, device=device)
        return cls(
            normal(sequences, seq, hidden).bfloat16().requires_grad_(),
            (normal(vocab, hidden) * (logit_std / hidden**0.5)).bfloat16().requires_grad_(),
            torch.randint(vocab, (sequences, seq), generator=generator, device=device),
            normal(sequences, seq),
        )

    def upcast(self) -> "Inputs":
        return Inputs(
            self.hidden.detach().double().requires_grad_(),
            self.weight.detach().double().requires_grad_(),
            self.labels,
            self.advantages.double(),
        )

    def gradients_of(self, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, ...]:
        """What a policy gradient sends back to the hidden states and the head."""
        loss = -(self.advantages * log_probs).mean()
        if entropy is not None:
            loss = loss - ENTROPY_WEIGHT * entropy.mean()
        return torch.autograd.grad(loss, (self.hidden, self.weight))


@dataclass(frozen=True)
class Scored:
    log_probs: Tensor | None
    entropy: Tensor | None
    gradients: tuple[Tensor, ...]


Candidate = Callable[[Inputs], Scored]


def ours(inputs: Inputs, *, entropy: bool, budget: str | int = "balanced") -> Scored:
    options = LossOptions(budget=budget)
    found = linear_log_probs(
        inputs.hidden, inputs.weight, inputs.labels, options, temperature=TEMPERATURE, entropy=entropy
    )
    return Scored(found.log_probs, found.entropy, inputs.gradients_of(found.log_probs, found.entropy))


def ours_of_logits(inputs: Inputs, *, entropy: bool) -> Scored:
    """The kernel on all logits, which its gradient overwrites: nothing is computed twice."""
    logits = functional.linear(inputs.hidden, inputs.weight)
    found = log_probs(logits, inputs.labels, LossOptions(in_place=True), temperature=TEMPERATURE, entropy=entropy)
    del logits
    return Scored(found.log_probs, found.entropy, inputs.gradients_of(found.log_probs, found.entropy))


def scores_of_logits(hidden: Tensor, weight: Tensor, labels: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """As TRL writes them: selective_log_softmax and entropy_from_logits."""
    logits = functional.linear(hidden, weight)
    logits = (logits.float() if logits.dtype == torch.bfloat16 else logits) / TEMPERATURE
    log_probs = functional.log_softmax(logits, dim=-1)
    own = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return own, -(log_probs.exp() * log_probs).sum(-1) if entropy else None


def in_chunks(inputs: Inputs, *, entropy: bool, compiled: bool) -> Scored:
    """Plain torch: chunks of tokens, each computed again in backward."""
    one = functools.partial(_compiled_scores() if compiled else scores_of_logits, entropy=entropy)
    hidden = inputs.hidden.reshape(-1, inputs.hidden.shape[-1]).split(CHUNK_TOKENS)
    labels = inputs.labels.reshape(-1).split(CHUNK_TOKENS)
    parts = [
        checkpoint(one, rows, inputs.weight, own, use_reentrant=False) for rows, own in zip(hidden, labels, strict=True)
    ]
    log_probs = torch.cat([part[0] for part in parts]).view(inputs.labels.shape)
    entropies = torch.cat([part[1] for part in parts]).view(inputs.labels.shape) if entropy else None
    return Scored(log_probs, entropies, inputs.gradients_of(log_probs, entropies))


@functools.cache
def _compiled_scores() -> Any:
    return torch.compile(scores_of_logits)


def liger_grpo(inputs: Inputs) -> Scored:
    """The loss as liger-kernel ships it, compiled in part; of a first step, whose ratios are 1."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    sequences, seq = inputs.labels.shape
    # its advantages belong to sequences; its cost does not depend on them
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, temperature=TEMPERATURE, loss_type="grpo")(
        inputs.hidden,
        inputs.weight,
        inputs.labels,
        torch.ones(sequences, seq, device=inputs.labels.device),
        inputs.advantages[:, 0].contiguous(),
    )[0]
    return Scored(None, None, torch.autograd.grad(loss, (inputs.hidden, inputs.weight)))


def liger_log_probs(inputs: Inputs) -> Scored:
    """The function of liger-kernel's GRPO loss that makes log-probabilities, on all tokens at once."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    found = LigerFusedLinearPPOBase.chunk_forward(inputs.hidden, inputs.weight, inputs.labels, temperature=TEMPERATURE)
    return Scored(found, None, inputs.gradients_of(found, None))


def trl_scores(inputs: Inputs, *, entropy: bool) -> Scored:
    """The function that TRL's trainers compute log-probabilities with, with its chunks."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    hidden, labels = inputs.hidden.reshape(-1, inputs.hidden.shape[-1]), inputs.labels.reshape(-1)
    outputs = ("entropy",) if entropy else ()
    found = ChunkedLogProbFunction.apply(
        hidden, inputs.weight, None, labels, TEMPERATURE, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
    )
    log_probs = found[0].view(inputs.labels.shape)
    entropies = found[1].view(inputs.labels.shape) if entropy else None
    return Scored(log_probs, entropies, inputs.gradients_of(log_probs, entropies))


def with_tf32(run: Candidate) -> Candidate:
    """The same with TF32 in fp32 products, which is not torch's default."""

    def call(inputs: Inputs) -> Scored:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return run(inputs)
        finally:
            torch.set_float32_matmul_precision(before)

    return call


CANDIDATES: dict[str, Candidate] = {
    OURS: functools.partial(ours, entropy=True),
    f"{OURS}, no entropy": functools.partial(ours, entropy=False),
    # the budget in which all logits fit
    f"{OURS}, 2.5 GiB": functools.partial(ours, entropy=True, budget=LARGE_BUDGET_BYTES),
    f"{OURS}, all logits": functools.partial(ours_of_logits, entropy=True),
    "TRL": functools.partial(trl_scores, entropy=True),
    "TRL, no entropy": functools.partial(trl_scores, entropy=False),
    "torch": functools.partial(in_chunks, entropy=True, compiled=False),
    "torch.compile": functools.partial(in_chunks, entropy=True, compiled=True),
    "torch.compile, no entropy": functools.partial(in_chunks, entropy=False, compiled=True),
    LIGER: liger_grpo,
    f"{LIGER}, TF32": with_tf32(liger_grpo),
    LIGER_SCORES: liger_log_probs,
}


def errors_of(run: Candidate, inputs: Inputs) -> dict[str, float]:
    """Relative Frobenius errors against fp64 of whatever the candidate returns."""
    found = run(inputs)
    if found.log_probs is None:
        return {}
    exact_inputs = inputs.upcast()
    has_entropy = found.entropy is not None
    flat = (exact_inputs.hidden, exact_inputs.weight, exact_inputs.labels)
    log_probs, entropy = scores_of_logits(*flat, entropy=has_entropy)
    exact = {"log_probs": log_probs, "entropy": entropy}
    values = {"log_probs": found.log_probs, "entropy": found.entropy}
    for name, own, true in zip(
        ("d_hidden", "d_weight"), found.gradients, exact_inputs.gradients_of(log_probs, entropy), strict=True
    ):
        exact[name], values[name] = true, own
    return {
        name: ((value.double() - exact[name]).norm() / exact[name].norm()).item()
        for name, value in values.items()
        if value is not None
    }


def why(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def measure_errors(device: str) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    inputs = Inputs.random(SMALL, device, logit_std=3.0)
    errors: dict[str, dict[str, float]] = {}
    missing: dict[str, str] = {}
    for name, run in CANDIDATES.items():
        if device == "cpu" and "compile" in name:
            continue
        try:
            errors[name] = errors_of(run, inputs)
        except Exception as error:  # a peer may raise anything; the others still count
            missing[name] = why(error)
    return errors, missing


def measure(rounds: int) -> dict[str, Any]:
    from ligerprof.runs.bench.session import CudaClock, CudaMachine, three_products

    machine = CudaMachine()
    errors, missing = measure_errors("cuda")
    inputs = Inputs.random((SEQUENCES, SEQ, HIDDEN, VOCAB), "cuda", logit_std=1.3)
    gradient_bytes = sum(value.numel() * value.element_size() for value in (inputs.hidden, inputs.weight))
    peaks: dict[str, int] = {}
    contests: list[Contest] = []
    for name, run in CANDIDATES.items():
        if name in missing:
            continue

        def call(run: Candidate = run) -> tuple[Tensor, ...]:
            return run(inputs).gradients

        try:
            call()
            call()
            peaks[name] = machine.extra_peak_bytes(call) - gradient_bytes
        except Exception as error:  # for example out of memory
            missing[name] = why(error)
            machine.release()
            continue
        print(f"{name}: {peaks[name] / MIB:,.1f} MiB", file=sys.stderr, flush=True)
        contests.append(Contest(name=name, run=call, references=(FLOOR,)))
    machine.release()
    references = {FLOOR: three_products(inputs.hidden.view(-1, HIDDEN), inputs.weight)}
    turns = dataclasses.replace(TURNS, rounds=rounds)
    found = compare_in_turns(contests, references, CudaClock(flush=False), turns, machine.conditions)
    return {
        "schema": 2,
        "kind": "rl_head",
        **machine.environment(),
        "versions": dict(package_versions()),
        "tokens": SEQUENCES * SEQ,
        "sequences": SEQUENCES,
        "hidden": HIDDEN,
        "vocab": VOCAB,
        "small": SMALL,
        "candidates": {
            name: {
                **dataclasses.asdict(found[name]),
                "bytes_beyond_gradients": peak,
                "errors": errors.get(name, {}),
            }
            for name, peak in peaks.items()
        },
        "missing": missing,
    }


def table_rows(results: Path) -> Iterator[str]:
    yield "| candidate | ms | share of the products' speed | times liger-kernel's | MiB beyond gradients | errors |"
    yield "|---|---:|---|---:|---:|---|"
    for line in results.read_text().splitlines():
        row = json.loads(line)
        candidates = row["candidates"]
        shares = {name: median_interval(one["shares"][FLOOR]) for name, one in candidates.items()}
        liger = shares.get(LIGER, shares.get(LIGER_SCORES))
        for name, one in candidates.items():
            errors = ", ".join(f"{of} {error:.1e}" for of, error in one["errors"].items())
            against = f"{shares[name].median / liger.median:.2f}" if liger else "-"
            yield (
                f"| {name} | {1e3 * statistics.median(one['seconds']):.1f} | {shares[name].median:.3f}"
                f" ({shares[name].low:.3f} to {shares[name].high:.3f}) | {against} |"
                f" {one['bytes_beyond_gradients'] / MIB:,.1f} | {errors} |"
            )
        floor = [seconds for one in candidates.values() for seconds in one["reference_seconds"][FLOOR]]
        yield f"| three products alone | {1e3 * statistics.median(floor):.1f} | 1 | | | |"
        for name, reason in row["missing"].items():
            yield f"| {name} | {reason} | | | | |"
        if liger is not None and OURS in shares:
            faster = shares[OURS].median / liger.median
            mib = candidates[OURS]["bytes_beyond_gradients"] / MIB
            verdict = "met" if faster >= SPEEDUP and mib <= BUDGET_MIB else "MISSED"
            yield f"goal {verdict}: {faster:.2f} >= {SPEEDUP}, {mib:,.1f} MiB <= {BUDGET_MIB}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--rounds", type=int, default=TURNS.rounds, help="turns of each candidate")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.what == "measure" and arguments.device == "cpu":
        errors, missing = measure_errors("cpu")
        print(json.dumps({"errors": errors, "missing": missing}, indent=1))
        return
    if arguments.what == "measure":
        row = measure(arguments.rounds)
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        with arguments.results.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
    for line in table_rows(arguments.results):
        print(line)


if __name__ == "__main__":
    main()
