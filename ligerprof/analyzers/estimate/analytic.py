"""The estimate of a recipe: its figures, and what they assume and leave out."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ligerprof.analyzers.estimate.activations import is_covered
from ligerprof.analyzers.estimate.compared import compared_with
from ligerprof.analyzers.estimate.context import is_eager
from ligerprof.analyzers.estimate.fused import keeps_products
from ligerprof.analyzers.estimate.headroom import headroom_note, settle_flce_budget
from ligerprof.analyzers.estimate.host import host_bytes, main_memory
from ligerprof.analyzers.estimate.judge import judge
from ligerprof.analyzers.estimate.placement import paged_bytes
from ligerprof.analyzers.estimate.places import PlaceBytes, places, spread, sums, weight_place
from ligerprof.analyzers.estimate.replayed import Peak, run_estimate
from ligerprof.analyzers.estimate.result import FitVerdict, HostVerdict, MemoryEstimate, Term
from ligerprof.analyzers.estimate.routings import routing_assumption, routing_range
from ligerprof.analyzers.estimate.scaled_dot_product import attention_kernels
from ligerprof.analyzers.estimate.static import make_weights
from ligerprof.analyzers.estimate.step import run_step, step_kinds
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.analyzers.estimate.terms import buffer_terms, checkpoint_term, logits_term, static_term
from ligerprof.analyzers.estimate.traced import traced_layers
from ligerprof.errors import DoesNotFitError, LigerprofError, UnknownModelError, UnsupportedError
from ligerprof.gpus import Vendor
from ligerprof.kernels.registry import find_kernel_set
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.models.spec import Task
from ligerprof.recipe.categories import Attention, Engine, GradSync, Loss, Offload, Optimizer, Step, Wrap
from ligerprof.recipe.conflicts import require_gathered_head
from ligerprof.recipe.lengths import at_longest
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit, lowest_limit
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.text import printable
from ligerprof.torch_memory.attention import AttentionKernel
from ligerprof.torch_memory.distributed import WORST_RANK
from ligerprof.torch_memory.saved_tensors import FUSED_ATTENTION, MATMULS, layer_runs
from ligerprof.units import format_bytes


def estimate(recipe: TrainingRecipe) -> MemoryEstimate:
    """Predict the memory of one training step from the recipe's sizes alone, without importing torch.

    The recipe's memory limit is judged; the memory of its GPU is not, see `judged`.

    Raises:
        UnknownModelError: an architecture that the estimate does not cover.
        UnsupportedError: an option that the estimate does not cover.
        KernelUnavailableError: a kernel that the provider does not have.
    """
    given, of_lengths = recipe, recipe.lengths
    recipe = at_longest(recipe)
    _require_estimable(recipe)
    headroom = headroom_note(recipe)
    recipe = settle_flce_budget(recipe)
    run, steady = run_estimate(recipe, given)
    weights = make_weights(recipe)
    peaks = {step: run.peak_bytes(number) for number, step in enumerate(step_kinds(recipe), start=1)}
    phases = run.peaks[run.steady]
    peak_phase = max(phases, key=lambda phase: phases[phase].allocated_bytes)
    held = run.held_at(run.steady, phases[peak_phase])
    evaluation = run.peaks[run.steady + 1].get(Phase.EVALUATION)
    evaluated = None if evaluation is None else run.held_at(run.steady + 1, evaluation)
    saving = run.peaks[run.steady + 2].get(Phase.SAVING)
    static, *others = terms = tuple(_terms(recipe, steady.logits_bytes))
    routing = routing_range(recipe, peaks[Step.STEADY], _steady_peak_bytes)
    checkpoint_bytes = sum(term.size_bytes for term in others if term.name == "checkpoints")
    in_host = host_bytes(recipe, weights.values()) + steady.host_bytes
    estimated = MemoryEstimate(
        recipe=given,
        run=run,
        peak_bytes=peaks[Step.STEADY],
        peak_phase=peak_phase,
        phases={phase: peak.allocated_bytes for phase, peak in _phases(phases, evaluation).items()},
        static_bytes=static.size_bytes,
        checkpoint_bytes=checkpoint_bytes,
        logits_bytes=steady.logits_bytes,
        roles=_by_role(held),
        layers=tuple(_layers(recipe, weights, held)),
        first_step_peak_bytes=peaks[Step.FIRST],
        second_step_peak_bytes=peaks.get(Step.SECOND),
        evaluation_roles=None if evaluated is None else _by_role(evaluated),
        saving_peak_bytes=None if saving is None else saving.allocated_bytes,
        host_bytes=in_host,
        main_memory=main_memory(recipe, weights.values(), in_host),
        terms=terms,
        assumed=(
            *_assumed_of_lengths(recipe, of_lengths),
            *_assumed(recipe),
            *routing_assumption(recipe, routing),
            *([] if headroom is None else [headroom]),
        ),
        left_out=tuple(_left_out(recipe)),
        routing=routing,
        compared=compared_with(recipe),
    )
    return judged(estimated)


def judged(estimated: MemoryEstimate, *, by_gpu: bool = False) -> MemoryEstimate:
    """The estimate with its verdict on the recipe's memory limit, the GPU's memory, or the lower of both.

    It also judges main memory, if that has a limit.

    Args:
        by_gpu: whether the user chose the GPU; otherwise its memory is not a limit.

    Returns:
        the estimate itself without a limit, and for a compiled step, whose peak it does not know.
    """
    recipe = estimated.recipe
    if recipe.compile:
        return estimated
    if recipe.host_memory_bytes is not None:
        host = HostVerdict(limit_bytes=recipe.host_memory_bytes, needed_bytes=estimated.host_bytes * recipe.gpus)
        estimated = replace(estimated, host=host)
    if by_gpu:
        limit = lowest_limit(recipe)
    elif recipe.memory_limit_bytes is not None:
        limit = Limit(size_bytes=recipe.memory_limit_bytes, source="--memory-limit")
    else:
        return estimated
    return replace(estimated, gpu=_verdict(estimated, limit))


def _verdict(estimated: MemoryEstimate, limit: Limit) -> FitVerdict:
    moment, allocated_bytes = estimated.highest
    run = estimated.run
    return FitVerdict(
        limit_bytes=limit.size_bytes,
        limit_source=limit.source,
        decided_by=moment,
        allocated_bytes=allocated_bytes,
        answer=judge(limit.size_bytes, run.completes_under, uncertain_share=run.uncertain_share),
    )


def require_host_memory(recipe: TrainingRecipe) -> None:
    """Raise DoesNotFitError if a recipe needs more main memory than its limit on that; nothing without one."""
    host = None if recipe.host_memory_bytes is None else estimate(recipe).host
    if host is not None and not host.fits:
        needed, limit = format_bytes(host.needed_bytes), format_bytes(host.limit_bytes)
        raise DoesNotFitError(
            f"it needs {needed} of main memory, over --host-memory {limit}. Allow more, or offload less with --offload."
        )


def estimated_peak_bytes(recipe: TrainingRecipe) -> int | None:
    """The estimated peak, or None if the estimate does not cover the architecture or an option."""
    try:
        return estimate(recipe).peak_bytes
    except LigerprofError:
        return None


def kernel_calls(recipe: TrainingRecipe) -> tuple[tuple[KernelSpec, KernelShape], ...]:
    """The different calls, in one training step, of kernels that state their memory.

    Raises:
        LigerprofError: as `estimate`.
    """
    recipe = settle_flce_budget(recipe)
    calls: dict[tuple[KernelSpec, KernelShape], None] = {}

    def noted(kernel: KernelSpec) -> KernelSpec:
        state = kernel.memory
        if state is None:
            return kernel

        def memory(shape: KernelShape) -> KernelMemory:
            calls[kernel, shape] = None
            return state(shape)

        return replace(kernel, memory=memory)

    noted_kernels = {name: noted(kernel) for name, kernel in find_kernel_set(recipe.providers, recipe.spec).items()}
    run_step(recipe, noted_kernels, Step.STEADY)
    return tuple(calls)


def _phases(phases: Mapping[Phase, Peak], evaluation: Peak | None) -> Mapping[Phase, Peak]:
    return phases if evaluation is None else {**phases, Phase.EVALUATION: evaluation}


def _steady_peak_bytes(recipe: TrainingRecipe) -> int:
    run, _ = run_estimate(recipe)
    return run.peak_bytes(run.steady)


_Held = Mapping[tuple[str, Role], int]


def _by_role(held: _Held) -> MemoryBreakdown:
    roles = Counter[Role]()
    for (_, role), size_bytes in held.items():
        roles[role] += size_bytes
    return MemoryBreakdown(roles=roles)


def _layers(recipe: TrainingRecipe, weights: Mapping[str, Weight], held: _Held) -> Iterator[PlaceBytes]:
    """What each part of the model holds; blocks that several parts have in common are divided among them."""
    traced = traced_layers(recipe)
    placed = [(weight_place(recipe, name, traced), weight) for name, weight in weights.items()]
    stored = sums((place, sum(weight.stored_sizes)) for place, weight in placed)
    trained = sums((place, weight.elements) for place, weight in placed if weight.trainable)
    parts = {Role.PARAMETERS: stored, Role.GRADIENTS: trained, Role.OPTIMIZER_STATES: trained}
    roles: dict[str, Counter[Role]] = defaultdict(Counter)
    for (part, role), size_bytes in held.items():
        for name, share_bytes in spread(size_bytes, {} if part else parts.get(role, {})):
            roles[part or name][role] += share_bytes
    for name, count in places(traced):
        yield PlaceBytes(name=name, count=count, roles=MemoryBreakdown(roles=roles[name]))


def _require_estimable(recipe: TrainingRecipe) -> None:
    require_gathered_head(recipe, command="estimate")
    if recipe.spec.no_estimate_reason is not None:
        raise UnknownModelError(
            f"{recipe.spec.name}: {recipe.spec.no_estimate_reason}. Use `ligerprof step --device simulated`."
        )
    if recipe.spec.tape is not None:
        return
    if recipe.spec.architecture.attention.sinks and not is_eager(recipe):
        raise UnsupportedError(
            f"estimate: {recipe.spec.name} has attention sinks, which transformers computes with eager attention only."
            " Add --attention eager."
        )
    if not is_covered(recipe.spec):
        raise UnsupportedError(
            f"estimate: {recipe.spec.name} has the activation function {printable(recipe.spec.activation)}, which is"
            " not covered yet. Use `ligerprof step --device simulated`."
        )
    if recipe.engine.is_fsdp and recipe.reentrant:
        raise UnsupportedError(
            f"estimate: --reentrant with --engine {recipe.engine} is not supported yet; leave it out."
        )
    if recipe.activation_offload:
        _require_estimable_offload(recipe)
    if recipe.selective is not None:
        policies = [run.policy for run in layer_runs(recipe.selective) if run.policy is not None]
        operators = [name for policy in policies for name in policy.every]
        _require_known([name for name in operators if name not in (*MATMULS, *FUSED_ATTENTION)])


def _require_estimable_offload(recipe: TrainingRecipe) -> None:
    """The copies of transposed tensors, which layers save, are not counted."""
    whole = not recipe.reentrant and all(map(recipe.checkpoints_layer, range(recipe.spec.layers)))
    if not whole or recipe.loss not in (Loss.HF, Loss.HF_4_45):
        raise UnsupportedError(
            "--activation-offload is estimated only with all layers under non-reentrant checkpointing, and without a"
            " chunked loss. Use `ligerprof step --device simulated`."
        )


def _require_known(unknown: Sequence[str]) -> None:
    if unknown:
        raise UnsupportedError(
            f"--selective: the estimate does not know what outputs of {unknown[0]} take. Use `ligerprof step"
            " --device simulated`."
        )


def _terms(recipe: TrainingRecipe, logits_bytes: int) -> Iterator[Term]:
    weights = make_weights(recipe)
    yield static_term(recipe, weights.values())
    yield from buffer_terms(recipe, weights)
    if (checkpoints := checkpoint_term(recipe)) is not None:
        yield checkpoints
    yield logits_term(recipe, logits_bytes)


def _assumed_of_lengths(longest: TrainingRecipe, file: str | None) -> Iterator[str]:
    if file is not None:
        yield (
            f"the largest micro-batch of {printable(file)}, {longest.rows} x {longest.row_tokens} tokens; what the"
            " allocator keeps after others takes --simulate"
        )


def _assumed_of_deepspeed(recipe: TrainingRecipe) -> Iterator[str]:
    if recipe.engine is Engine.DEEPSPEED and recipe.deepspeed_config is None:
        yield "DeepSpeed's default sizes of buckets and live parameters, overlap_comm off, even shares"
    if recipe.offload is Offload.NVME:
        yield "NVMe offload follows DeepSpeed's source; it was never measured"


def _assumed_of_model(recipe: TrainingRecipe) -> Iterator[str]:
    if (tape := recipe.spec.tape) is not None:
        yield (
            f"traced from the model's own code at {tape.batch[0]} to {tape.batch[1]} sequences of {tape.seq[0]} to"
            f" {tape.seq[1]} tokens"
        )
    if recipe.spec.tape is not None and recipe.spec.tape.bounded_bytes:
        yield f"some requests of up to {format_bytes(recipe.spec.tape.bounded_bytes)} count with an upper bound"
    if recipe.like is not None:
        yield f"{printable(recipe.spec.name)} is unknown: the architecture and sizes of {printable(recipe.like)}"


def _assumed(recipe: TrainingRecipe) -> Iterator[str]:
    yield "gradients are None when a step begins (zero_grad's default)"
    yield from _assumed_of_model(recipe)
    yield from _assumed_of_deepspeed(recipe)
    gpu = recipe.gpu_spec
    if recipe.holds_several_documents:
        yield _documents_assumption(recipe)
    if is_eager(recipe):
        needed = ", as transformers 5.23 requires it for this model" if recipe.spec.needs_eager else ""
        yield f"attention is eager{needed}: each score matrix is a tensor"
    else:
        if recipe.spec.attention_softcap is not None:
            yield "SDPA omits the softcap of the scores, as in transformers 5.17; later versions require eager"
        tape = recipe.spec.tape
        used = attention_kernels(recipe) if tape is None else map(AttentionKernel, tape.attention)
        kernels = " or ".join(f"{kernel.label} kernel" for kernel in used) or "no kernel"
        if gpu.vendor is Vendor.AMD:
            yield f"which attention kernel ROCm runs is not known; counted: {kernels}"
        elif recipe.attention is Attention.FLASH:
            yield f"FlashAttention keeps what {kernels} of scaled_dot_product_attention does on {gpu.title}"
        else:
            yield f"scaled_dot_product_attention uses {kernels} on {gpu.title}"
    if not gpu.measured:
        yield f"{gpu.title}: library workspaces follow torch's source; this GPU was not measured"
    if gpu.nominal:
        yield f"{gpu.title}: the capacity of {format_bytes(gpu.memory_bytes)} is nominal; no report of torch's is known"
    yield from _assumed_of_mixers(recipe)
    yield from _assumed_of_packages(recipe)
    if keeps_products(recipe):
        yield "the layer after a gated activation has an adapter, so the activation's product is saved"
    if recipe.autocast and recipe.weight_dtype == "float32":
        sharded = recipe.engine.is_fsdp
        yield "autocast keeps its 16-bit weights until the forward pass ends" + (
            ", those of all layers; --precision mixed has none" if sharded else ""
        )
    yield from _assumed_of_ranks(recipe)


def _documents_assumption(recipe: TrainingRecipe) -> str:
    if recipe.attention is Attention.FLASH:
        return "a packed row holds several documents, which FlashAttention takes as sequences of their own"
    if not recipe.spec.architecture.masks_documents:
        return "a packed row holds several documents, which transformers' code of this model does not keep apart"
    tokens = recipe.row_tokens
    return (
        f"a packed row of {tokens} tokens holds several documents: transformers makes a mask of {tokens} x {tokens} to"
        " keep them apart, where FlashAttention needs none"
    )


def _assumed_of_ranks(recipe: TrainingRecipe) -> Iterator[str]:
    if recipe.engine.is_fsdp:
        yield f"the figures are rank {WORST_RANK}'s: no rank has larger shards"
        if recipe.engine is Engine.FSDP1:
            yield "use_orig_params=True; flat parameters of another kind differ by what aligns them"
        elif recipe.reshard and recipe.wrap is Wrap.LAYERS:
            yield "the root is resharded after forward as well (reshard_after_forward=True)"
        if recipe.grad_accum > 1 and recipe.grad_sync is GradSync.LAST:
            yield "gradients stay whole until the last micro-batch reduces them; --grad-sync every shards them in each"
    if recipe.engine is Engine.DDP:
        yield "DDP's defaults: buckets of 25 MiB, the first of 1 MiB, built anew in the second step"


def _assumed_of_mixers(recipe: TrainingRecipe) -> Iterator[str]:
    if recipe.providers.get("swiglu") == "liger" and recipe.spec.experts:
        yield "experts are computed by transformers' code; liger-kernel's swiglu replaces that of some architectures"
    if recipe.spec.delta is not None:
        yield "the gated delta rule is transformers' own code, without the package fla, whose kernels keep less"
    if recipe.spec.state_space is not None:
        yield (
            "Mamba-2 mixers run transformers' own code of version 5.23, without the packages mamba_ssm and"
            " causal_conv1d, whose kernels keep less; version 5.17 keeps several times as much"
        )


def _assumed_of_packages(recipe: TrainingRecipe) -> Iterator[str]:
    if recipe.activation_offload:
        yield "saved tensors of 1 KiB and more are offloaded as by TRL's OffloadActivations of July 2026"
    if recipe.packed_bits == 8:
        yield (
            "8-bit weights as in bitsandbytes 0.50 (LLM.int8), and no outlier in their inputs: each column with one"
            " (beyond 6.0) adds 2 bytes per token while the graph lives, and copies in both passes"
        )
        if recipe.checkpointing and not recipe.reentrant:
            yield (
                "products of 8-bit weights keep their inputs, which non-reentrant checkpointing does not see;"
                " --reentrant frees them"
            )
    if recipe.packed_bits == 4:
        yield "4-bit weights as in bitsandbytes 0.50: NF4, double quantization; each product unpacks its weight"
    if recipe.optimizer.row.is_eight_bit:
        embeddings = "but not embeddings" if recipe.fp32_embedding_states else "embeddings included"
        yield f"8-bit moments as in bitsandbytes 0.50: blocks of 256, fp32 below 4096 elements, {embeddings}"
    if assumed := recipe.optimizer.row.assumed:
        yield assumed


def _left_out_of_offload(recipe: TrainingRecipe) -> Iterator[str]:
    if recipe.offload is Offload.NONE:
        return
    yield "in main memory, what the process uses without training: 1.3 to 1.8 GB in measured runs"
    if recipe.zero == 3 and recipe.precision.uses_float16:
        # has_overflow: isinf makes absolute values, then a mask
        yield "in main memory, what the check of fp16 gradients takes for a moment: 3 bytes per parameter of the rank"


def _left_out(recipe: TrainingRecipe) -> Iterator[str]:
    yield "the CUDA context, which is outside torch's allocator"
    if recipe.spec.text_of is not None:
        yield (
            f"the vision tower of {recipe.spec.text_of}: transformers' AutoModelForCausalLM builds the text model alone"
        )
    if recipe.spec.task is Task.IMAGES:
        yield "images: the batch is text alone, so the vision tower has weights and neither activations nor gradients"
    if recipe.compile:
        yield (
            "torch.compile, which fuses operations, keeps other tensors for backward and computes some again: the"
            " figures are those of the step without it, and no limit is judged"
        )
    if recipe.gpus > 1:
        yield "NCCL's own buffers"
    yield from _left_out_of_offload(recipe)
    if paged := paged_bytes(recipe, make_weights(recipe).values()):
        yield (
            f"{format_bytes(paged)} of paged optimizer states, outside torch's allocator: the driver keeps them on the"
            " GPU while there is room, else in main memory"
        )
    if recipe.optimizer is Optimizer.GALORE:
        yield (
            "in steps that decompose gradients, cuSOLVER's workspace for matrices with fewer than 512 rows or columns,"
            " and for those that are nearly square"
        )
    if recipe.eval_batch is not None and not recipe.spec.rotary:
        yield "in the evaluation, two tensors of hidden states: local variables of the code with learned positions"
    if recipe.clip:
        yield "the norms that clipping computes (a few MiB)"
