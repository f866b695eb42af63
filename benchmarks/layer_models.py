"""Small models on the CPU, whose layers and what surrounds them are recorded as tapes."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, masking_utils
from transformers.activations import ACT2FN
from transformers.integrations import moe
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from benchmarks.layer_recorder import Functions, Recorder, UnknownOperatorError, quiet, several
from ligerprof.models import ModelSpec
from ligerprof.models.architecture import Linear
from ligerprof.models.layer_tape import LOOPS, Step, in_turn, mixes_beside_attention, sized, sizes_of, unrolled
from ligerprof.runs.activation_offload import checkpointed_layers

_ATTENTION = "ligerprof_recorded"
_ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_emb")
_HALF = "_cast_if_autocast_enabled"
_UNPAD = "apply_mask_to_padding_states"
MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
ROWS, TOKENS = 7, 11
# of eager attention: heads, which may share keys and values, and elements of a head of the query and of the value
HEADS, KV_HEADS = 20, 5
_ATTENTION_SIZES = ("heads", "kv heads", "heads per kv", "head", "head value")
_HEAD, _HEAD_VALUE = 16, 24
# of a whole model; no other size of it is 5, 10 or 11
MODEL_ROWS, MODEL_TOKENS = 5, 10
# of experts that run in turn: all tokens, and those of the first experts; no other sizes are these
_EXPERT_TOKENS, _FIRST_EXPERTS = 41, (21, 25)


class SmallModel:
    """A model on the CPU whose layers can be recorded, of small sizes."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> None:
        config = AutoConfig.for_model(**spec.config)
        config.use_cache = False
        self._dropouts = dict(_named_dropouts(config))
        self._spec = spec
        self._recorder: Recorder | None = None
        # the module that has attended last, and what it has passed besides tensors
        self._attending: tuple[nn.Module, dict[str, Any]] | None = None
        # what each call of `to` in a layer's mixer casts to
        self._casts: dict[int, list[str]] = {}
        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, self._attend)
        self._model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=_ATTENTION
        ).train()
        self._layers = checkpointed_layers(self._model)

    def record(self, index: int, rows: int = ROWS, tokens: int = TOKENS) -> list[Step]:
        """The steps of a layer."""
        sizes = _layer_sizes(self._spec, index, rows, tokens)
        if _mixer(self._spec, index) is None:
            return self._run(index, rows, tokens, Recorder(self._spec, self._layers[index], sizes)).finish()
        if (casts := self._casts.get(index)) is None:
            with self._in_float16(), torch.autocast("cpu", dtype=torch.bfloat16):
                seen = self._run(index, 1, 1, Recorder(self._spec, self._layers[index], sizes))
            casts = self._casts[index] = seen.targets
        backward = Recorder(self._spec, self._layers[index], sizes, casts=casts)
        self._run(index, rows, tokens, backward, backward=True)
        recorder = Recorder(self._spec, self._layers[index], sizes, casts=casts, copies=backward.copying)
        return self._run(index, rows, tokens, recorder).finish()

    def record_loop(self, index: int, rows: int, chunk: int, missing: int) -> list[Step]:
        """The steps of a layer that loops over chunks of tokens, of which the last lacks so many tokens."""
        recorded = [self.record(index, rows, count * chunk - missing) for count in range(LOOPS, LOOPS + 3)]
        steps = _looped(*recorded[:2])
        if [list(unrolled(steps, count)) for count in range(LOOPS, LOOPS + 3)] != recorded:
            raise UnknownOperatorError("a loop whose turns are not alike")
        return steps

    def record_experts(self, index: int) -> list[Step]:
        """The steps of a layer's experts run in turn: those of the first, and those that each further one runs."""
        recorded = [self._run_experts(index, hits) for hits in (1, 2, 3)]
        steps = _looped(*recorded[:2])
        for hits, steps_of_hits in enumerate(recorded, 1):
            # each turn has the name of its size
            if list(in_turn(steps, ["routed"] * hits)) != [sized(step, hits=hits) for step in steps_of_hits]:
                raise UnknownOperatorError("experts whose turns are not alike")
        return steps

    def _run_experts(self, index: int, hits: int) -> list[Step]:
        """Run the experts of a layer, of which so many have tokens."""
        layer, spec, mlp = self._layers[index], self._spec, self._spec.architecture.mlp
        assert mlp.experts is not None
        experts = layer.get_submodule(f"{mlp.name}.experts")
        config = experts.config
        first = _FIRST_EXPERTS[: hits - 1]
        routed = (*first, _EXPERT_TOKENS * spec.chosen_experts - sum(first))
        sizes = {**_layer_sizes(spec, index, 1, _EXPERT_TOKENS), spec.experts + 1: "classes"}
        sizes |= dict.fromkeys(routed, "routed")
        recorder = Recorder(spec, experts, sizes)
        chosen = torch.arange(hits).repeat_interleave(torch.tensor(routed)).view(_EXPERT_TOKENS, -1)
        value = torch.ones(_EXPERT_TOKENS, spec.hidden_size, dtype=torch.bfloat16)
        scores = torch.ones(chosen.shape, dtype=torch.bfloat16)
        with ExitStack() as stack, torch.no_grad(), recorder:
            for name, module in experts.named_modules():
                if (kind := _kind(module)) is not None:
                    leave = partial(_leave_macro, recorder, (kind, name))
                    _watch(module, partial(_enter_macro, recorder), leave, stack)
            stack.callback(setattr, config, "_experts_implementation", config._experts_implementation)
            config._experts_implementation = "eager"
            stack.enter_context(Functions(recorder, self._dropouts))
            recorder.add(value)
            recorder.add_table(chosen)
            recorder.add(scores)
            recorder.active = recorder.in_turn = True
            result = experts(value, chosen, scores)
            recorder.steps.append(["output", recorder.operand(result)])
            recorder.active = False
        return recorder.finish()

    @contextmanager
    def _in_float16(self) -> Iterator[None]:
        """Give the weights a dtype that neither autocast nor a cast to fp32 has."""
        parameters = list(self._model.parameters())
        dtypes = [item.dtype for item in parameters]
        for item in parameters:
            item.data = item.data.to(torch.float16)
        yield
        for item, dtype in zip(parameters, dtypes, strict=True):
            item.data = item.data.to(dtype)

    def _run(self, index: int, rows: int, tokens: int, recorder: Recorder, *, backward: bool = False) -> Recorder:
        """Run the model with a recorder of one layer."""
        layer, self._recorder, mixer = self._layers[index], recorder, _mixer(self._spec, index)
        wrapped = _wrapped_modules(self._spec, index)
        # another model may have registered its own
        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, self._attend)
        with ExitStack() as stack, nullcontext() if backward else torch.no_grad(), recorder:
            for name, module in layer.named_modules():
                kind = _kind(module)
                if kind is not None:
                    _watch(
                        module, partial(_enter_macro, recorder), partial(_leave_macro, recorder, (kind, name)), stack
                    )
                elif name in wrapped:
                    _watch(
                        module,
                        partial(_enter, recorder, wrapped[name], name),
                        partial(_leave, recorder, wrapped[name]),
                        stack,
                    )
                elif name == mixer:
                    _watch(module, partial(_enter_mixer, recorder), partial(_leave_mixer, recorder), stack)
            _watch(layer, partial(_start, recorder), partial(_stop, recorder), stack)
            modeling = importlib.import_module(type(layer).__module__)
            for name in _ROTATIONS:
                if (function := getattr(modeling, name, None)) is not None and self._spec.latent is None:
                    rotate = partial(_rotate, recorder, function)
                    stack.enter_context(mock.patch.object(modeling, name, rotate))
            if hasattr(modeling, _UNPAD):
                stack.enter_context(mock.patch.object(modeling, _UNPAD, partial(_unpad, recorder)))
            if mixer is not None:
                stack.enter_context(mock.patch.object(modeling, "ACT2FN", _Activations(recorder, self._spec)))
            for function in vars(modeling).values():
                if isinstance(function, type) and issubclass(function, torch.autograd.Function):
                    stack.enter_context(mock.patch.object(function, "apply", partial(_apply, recorder, function)))
            _watch_autocast(recorder, modeling, stack)
            stack.enter_context(mock.patch.object(moe, "_grouped_mm", partial(_grouped, recorder)))
            stack.enter_context(Functions(recorder, self._dropouts))
            output = self._model(input_ids=torch.zeros(rows, tokens, dtype=torch.long))
            if backward:
                output.logits.sum().backward()
        return recorder

    def record_model(self) -> list[Step]:
        """The steps of the model around its layers, up to the loss."""
        spec, model = self._spec, self._model
        sizes = {MODEL_ROWS: "rows", MODEL_TOKENS: "tokens", MODEL_TOKENS + 1: "labels"}
        sizes |= {spec.rotary_dim: "rotated", spec.rotary_dim // 2: "half"}
        recorder = Recorder(spec, model, sizes)
        ids, labels = torch.zeros(2, MODEL_ROWS, MODEL_TOKENS, dtype=torch.long).unbind()
        first, last = self._layers[0], self._layers[-1]
        with ExitStack() as stack, torch.no_grad(), recorder:
            recorder.add_table(ids)
            for name, module in model.named_modules():
                kind = "embed" if isinstance(module, nn.Embedding) else _kind(module)
                if kind is not None and not name.startswith(f"{spec.architecture.layers}."):
                    more = () if kind != "embed" else (type(module) is not nn.Embedding,)
                    leave = partial(_leave_macro, recorder, (kind, name, *more))
                    _watch(module, partial(_enter_macro, recorder), leave, stack)
                if "RotaryEmbedding" in type(module).__name__:
                    _watch(module, partial(_enter_tables, recorder), partial(_leave_tables, recorder), stack)
            head = model.get_submodule(spec.architecture.head)
            stack.callback(head.register_forward_pre_hook(partial(_enter_head, recorder), prepend=True).remove)
            stack.callback(first.register_forward_pre_hook(partial(_enter_layers, recorder), with_kwargs=True).remove)
            stack.callback(last.register_forward_hook(partial(_leave_layers, recorder)).remove)
            modeling = importlib.import_module(type(first).__module__)
            for name in set(MASKS) & set(vars(modeling)):
                stack.enter_context(mock.patch.object(modeling, name, partial(_mask, recorder, name)))
            stack.enter_context(
                mock.patch.object(model, "_loss_function", partial(_loss, recorder, model.loss_function), create=True)
            )
            stack.enter_context(Functions(recorder, self._dropouts))
            recorder.active = True
            loss = model(input_ids=ids, labels=labels).loss
            recorder.steps.append(["output", recorder.operand(loss)])
            recorder.active = False
        # some models make the masks of a set of kinds, which has no order
        names = iter(sorted((step[3] for step in recorder.steps if step[0] == "mask"), key=MASKS.index))
        return [[*step[:3], next(names)] if step[0] == "mask" else step for step in recorder.steps]

    def record_norm(self) -> list[Step]:
        """The steps of the norm after the layers, whose code is that of their norms."""
        norm = self._model.get_submodule(self._spec.architecture.final_norm)
        return record_function(self._spec, norm, norm, (self._spec.hidden_size,))

    def record_bare_norm(self) -> list[Step] | None:
        """The steps of a norm of heads without a weight; None without one."""
        modules = (module for layer in self._layers for module in layer.modules() if _kind(module) == "bare norm")
        norm = next(modules, None)
        return None if norm is None else record_function(self._spec, norm, norm, (self._spec.head_dim,))

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """In place of attention: its output, and the probabilities that eager attention returns."""
        recorder = self._recorder
        self._attending = module, {key: item for key, item in options.items() if not isinstance(item, Tensor)}
        rows, heads, tokens, _ = query.shape
        if recorder is None or not recorder.active or recorder.muted:
            return query.new_zeros(rows, tokens, heads, value.shape[-1]), None
        with quiet(recorder):
            output = query.new_zeros(rows, tokens, heads, value.shape[-1])
            probabilities = query.new_zeros(rows, heads, tokens, tokens)
        operands = [recorder.operand(item) for item in (query, key, value)]
        recorder.macro("attend", operands, [output, probabilities], query.is_contiguous())
        if tokens > 1 and (query.is_contiguous() != key.is_contiguous() or value.is_contiguous()):
            raise UnknownOperatorError("attention of tensors that are laid out in different ways")
        return output, probabilities

    def record_attention(self, rows: int, heads: int, kv_heads: int, *, apart: bool) -> list[Step] | None:
        """The steps of the architecture's own eager attention, from query, key, value and mask to the output as rows.

        Args:
            apart: whether the heads of query and key lie apart.

        Returns:
            None if it does not know so many heads of key and value.
        """
        if self._attending is None:
            self._model(input_ids=torch.zeros(1, 1, dtype=torch.long))
        assert self._attending is not None
        module, options = self._attending
        if heads != kv_heads and not hasattr(module, "num_key_value_groups"):
            return None
        function = importlib.import_module(type(module).__module__).eager_attention_forward
        counts = (HEADS, KV_HEADS, HEADS // KV_HEADS, _HEAD, _HEAD_VALUE)
        sizes = {
            ROWS: "rows",
            TOKENS: "tokens",
            TOKENS + 1: "labels",
            **dict(zip(counts, _ATTENTION_SIZES, strict=True)),
        }

        def run(recorder: Recorder, dtype: torch.dtype = torch.bfloat16, *, backward: bool = False) -> Recorder:
            shapes = ((heads, _HEAD, apart), (kv_heads, _HEAD, apart), (kv_heads, _HEAD_VALUE, False))
            inputs = [_heads(rows, *shape, dtype=dtype, backward=backward) for shape in shapes]
            mask = torch.zeros(rows, 1, TOKENS, TOKENS, dtype=dtype)
            with ExitStack() as stack, nullcontext() if backward else torch.no_grad(), recorder:
                stack.enter_context(Functions(recorder, self._dropouts))
                for item in inputs:
                    recorder.add(item)
                recorder.add_table(mask)
                recorder.active = recorder.mixes = True
                output, probabilities = function(module, *inputs, mask, **options)
                output = output.reshape(rows, TOKENS, -1)
                _note_outputs(recorder, (output, probabilities))
                recorder.active = False
                if backward:
                    output.backward(torch.ones_like(output))
            return recorder

        with ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(module, "num_key_value_groups", heads // kv_heads, create=heads == kv_heads)
            )
            for name, parameter in list(module.named_parameters(recurse=False)):
                weight = nn.Parameter(parameter.new_zeros(heads))
                stack.enter_context(mock.patch.object(module, name, weight))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                casts = run(Recorder(self._spec, module, sizes), torch.float16).targets
            learned = run(Recorder(self._spec, module, sizes, casts=casts), backward=True)
            return run(Recorder(self._spec, module, sizes, casts=casts, copies=learned.copying)).finish()


def record_mask(
    spec: ModelSpec, name: str, positions: Tensor, padding: Tensor | None, *, window: int, eager: bool
) -> list[Step]:
    """The steps of a function of transformers that makes a mask; their output is empty if it makes none.

    Args:
        positions: of the tokens of each sequence.
        padding: the mask of tokens; None without padding.
        window: tokens of a window or chunk.
    """
    config = PretrainedConfig(sliding_window=window, attention_chunk_size=window)  # type: ignore[no-untyped-call]
    config._attn_implementation = "eager" if eager else "sdpa"
    sizes = {MODEL_ROWS: "rows", MODEL_TOKENS: "tokens", MODEL_TOKENS + 1: "labels"}
    recorder = Recorder(spec, nn.Module(), sizes, casts=())
    embedded = torch.zeros(MODEL_ROWS, MODEL_TOKENS, 1, dtype=torch.bfloat16)
    with torch.no_grad(), recorder:
        recorder.add_table(positions if padding is None else padding)
        recorder.active = True
        mask = getattr(masking_utils, name)(config, embedded, padding, None, position_ids=positions)
        recorder.steps.append(["output", [] if mask is None else [recorder.operand(mask)]])
        recorder.active = False
    return recorder.finish()


def _heads(rows: int, heads: int, size: int, apart: bool, *, dtype: torch.dtype, backward: bool) -> Tensor:
    """A query, key or value whose heads lie apart, or between the tokens."""
    shape = (rows, heads, TOKENS, size) if apart else (rows, TOKENS, heads, size)
    made = torch.ones(shape, dtype=dtype, requires_grad=backward)
    return made if apart else made.transpose(1, 2)


def record_function(
    spec: ModelSpec,
    module: nn.Module,
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    casts: Sequence[str] | None = None,
) -> list[Step]:
    """The steps of a function of tensors, whose rows have these shapes; parameters are those of a module.

    Args:
        casts: what each call of `to` casts to, unless that is the dtype of a tensor; None if all calls do something.
    """
    recorder = Recorder(spec, module, {}, casts=casts)
    recorder.mixes = casts is not None
    values = [torch.ones(ROWS, TOKENS, *shape, dtype=torch.bfloat16) for shape in shapes]
    with ExitStack() as stack, torch.no_grad(), recorder, Functions(recorder, {}):
        _watch_autocast(recorder, importlib.import_module(type(module).__module__), stack)
        for value in values:
            recorder.add(value)
        recorder.active = True
        result = function(*values)
        _note_outputs(recorder, result)
        recorder.active = False
    return recorder.finish()


def _named_dropouts(config: PretrainedConfig) -> Iterator[tuple[float, tuple[str, float]]]:
    """Give each dropout of a config a probability of its own: its key and default by that."""
    for number, (key, value) in enumerate(sorted(config.to_dict().items())):
        if isinstance(value, float) and ("dropout" in key or "pdrop" in key):
            rate = 0.1 + number / 1024
            setattr(config, key, rate)
            yield rate, (key, value)


def _kind(module: nn.Module) -> str | None:
    """The step in place of a module's operators, if it has one."""
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return "linear"
    name = type(module).__name__
    if "Norm" in name and not name.endswith("Gated"):
        return "norm" if any(True for _ in module.parameters()) or name.endswith("LayerNorm") else "bare norm"
    origin = type(module).__module__
    return "activate" if origin in ("transformers.activations", "torch.nn.modules.activation") else None


# modules of layers
_MIXERS = {"delta": "linear_attn", "convolution": "conv", "states": "mamba"}


def _mixer(spec: ModelSpec, index: int) -> str | None:
    """The module of a layer that mixes tokens by something else than attention."""
    mixer = spec.architecture.mixer
    has_one = spec.layer_kinds.recurrent[index] or mixes_beside_attention(spec)
    return _MIXERS[mixer.kind] if mixer is not None and has_one else None


def _wrapped_modules(spec: ModelSpec, index: int) -> dict[str, str]:
    """Modules whose steps something else may replace: gated products by a kernel, and experts."""
    mlp = spec.architecture.mlp
    if not spec.layer_kinds.sparse[index]:
        return {} if mlp.gate is None else {mlp.name: "gated"}
    assert mlp.experts is not None
    found = dict[str, str]()
    for item in spec.architecture.tensors:
        if isinstance(item, Linear) and item.inputs == "shared":
            found[item.name.rpartition(".")[0]] = "gated"
    if not mlp.experts.multiplies_all:
        found[f"{mlp.name}.experts"] = "mixture"
    return found


def _watch(module: nn.Module, before: Callable[..., None], after: Callable[..., None], stack: ExitStack) -> None:
    for handle in (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ):
        stack.callback(handle.remove)


def _enter_macro(recorder: Recorder, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
    if recorder.active:
        recorder.count()
        recorder.muted += 1


def _leave_macro(recorder: Recorder, step: Sequence[Any], _module: nn.Module, *call: Any) -> None:
    """Record a step, given as its kind and details, in place of a module's call: of its arguments and its output."""
    args, kwargs, output = call
    if not recorder.active:
        return
    recorder.muted -= 1
    if recorder.muted:
        return
    values = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
    made = [item for item in (output if isinstance(output, tuple) else (output,)) if isinstance(item, Tensor)]
    recorder.macro(step[0], [recorder.operand(values[0])], made, *step[1:])
    if step[0] == "linear":
        recorder.turn(made[0])


def _enter_mixer(recorder: Recorder, *_call: Any) -> None:
    recorder.mixes = recorder.active


def _leave_mixer(recorder: Recorder, *_call: Any) -> None:
    recorder.mixes = False


def _unpad(recorder: Recorder, value: Tensor, *_mask: Any) -> Tensor:
    """In place of the product with the mask of tokens, which is not there without padding."""
    if not recorder.mixes:
        return value
    with quiet(recorder):
        result = value.clone()
    recorder.macro("unpad", [recorder.operand(value)], [result])
    return result


class _Activations(dict[str, Callable[[Tensor], Tensor]]):
    """The activation functions of a module that are not modules of their own."""

    def __init__(self, recorder: Recorder, spec: ModelSpec) -> None:
        super().__init__()
        self._recorder, self._configured = recorder, spec.activation

    def __missing__(self, name: str) -> Callable[[Tensor], Tensor]:
        return partial(self._activate, name) if name == self._configured else ACT2FN[name]

    def _activate(self, name: str, value: Tensor) -> Tensor:
        with quiet(self._recorder):
            result = ACT2FN[name](value)
        if self._recorder.mixes:
            self._recorder.macro("activate", [self._recorder.operand(value)], [result], name)
        return result


def _enter(recorder: Recorder, kind: str, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
    if recorder.active and not recorder.muted:
        values = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
        # whether a shared expert reads the very view of the tokens that experts read is known in the end
        more = [id(values[0])] if kind == "mixture" else []
        if kind == "gated":
            recorder.gated.add(id(values[0]))
        recorder.steps.append([kind, -1, [recorder.operand(item) for item in values], name, *more, 0])


def _leave(recorder: Recorder, kind: str, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
    if recorder.active and not recorder.muted:
        _close(recorder, kind, [output[0] if isinstance(output, tuple) else output])


def _grouped(recorder: Recorder, value: Tensor, weight: Tensor, **_offsets: Tensor) -> Tensor:
    with quiet(recorder):
        result = value.new_zeros(value.shape[0], weight.shape[-1])
    if recorder.active:
        recorder.macro("grouped product", [recorder.operand(value), recorder.operand(weight)], [result])
    return result


@contextmanager
def _autocast(recorder: Recorder, *_args: Any, enabled: bool = True, **_kwargs: Any) -> Iterator[None]:
    before, recorder.autocasts = recorder.autocasts, enabled
    yield
    recorder.autocasts = before


def _watch_autocast(recorder: Recorder, modeling: ModuleType, stack: ExitStack) -> None:
    for name, replacement in (("maybe_autocast", _autocast), (_HALF, _to_half)):
        if hasattr(modeling, name):
            stack.enter_context(mock.patch.object(modeling, name, partial(replacement, recorder)))


def _to_half(recorder: Recorder, _device: str, *args: Any) -> list[Any]:
    """In place of casts to the dtype of autocast's products, if it is on."""
    return [recorder.to_half(item) if isinstance(item, Tensor) else item for item in args]


def _apply(recorder: Recorder, function: Any, *args: Any) -> Tensor:
    """An autograd function: its tensors, which of them it saves, and which receive gradients."""
    saved: list[Tensor] = []
    call = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors))
    with quiet(recorder):
        result: Tensor = function.forward(call, *args)
        call.saved_tensors = tuple(saved)
        gradients = function.backward(call, torch.ones_like(result))
    if not recorder.active:
        return result
    given = [item for item, gradient in zip(args, gradients, strict=True) if gradient is not None]
    recorder.macro("function", [recorder.operand(item) for item in (*given, *saved)], [result], len(given))
    return result


def _close(recorder: Recorder, kind: str, outputs: Sequence[Tensor]) -> None:
    """Say what the steps since a step of this kind have made, and how many they are."""
    at = next(at for at in reversed(range(len(recorder.steps))) if recorder.steps[at][:2] == [kind, -1])
    made = [recorder.operand(item) for item in outputs]
    given = recorder.steps[at][2:-1]
    recorder.steps[at] = [kind, made if len(made) > 1 else made[0], *given, len(recorder.steps) - at - 1]


def _rotate(recorder: Recorder, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    turned = [item for item in args[:2] if isinstance(item, Tensor) and item.shape[-1] != 0]
    marks = recorder.active and not recorder.muted
    if marks:
        recorder.steps.append(["rotate", -1, [recorder.operand(item) for item in turned], 0])
    result = function(*args, **kwargs)
    if marks:
        _close(recorder, "rotate", result if isinstance(result, tuple) else [result])
    return result


def _start(recorder: Recorder, _module: nn.Module, args: Any, kwargs: Any) -> None:
    recorder.active = True
    recorder.add(args[0] if args else kwargs["hidden_states"])


def _stop(recorder: Recorder, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
    _note_outputs(recorder, output)
    recorder.active = False


def _note_outputs(recorder: Recorder, output: Any) -> None:
    made = [item for item in (output if isinstance(output, tuple) else (output,)) if isinstance(item, Tensor)]
    numbers = [recorder.operand(item) for item in made]
    recorder.steps.append(["output", numbers if len(numbers) > 1 else numbers[0]])


def _enter_tables(recorder: Recorder, _module: nn.Module, args: Any, kwargs: Any) -> None:
    # a set of kinds has no order; the tables of each are alike
    has_kinds = any(isinstance(item, str) for item in (*args, *kwargs.values()))
    before = sum(step[0] == "tables" for step in recorder.steps)
    recorder.steps.append(["tables", -1, [], before if has_kinds else 0, 0])


def _leave_tables(recorder: Recorder, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
    _close(recorder, "tables", output if isinstance(output, tuple) else [output])


def _mask(recorder: Recorder, name: str, *_args: Any, **_kwargs: Any) -> Tensor:
    with quiet(recorder):
        made = torch.ones(1, 1, MODEL_TOKENS, MODEL_TOKENS, dtype=torch.bool)
    recorder.steps.append(["mask", recorder.add_table(made), [], name])
    return made


def _enter_layers(recorder: Recorder, _module: nn.Module, args: Any, kwargs: Any) -> None:
    stream = args[0] if args else kwargs["hidden_states"]
    recorder.steps.append(["layers", -1, [recorder.operand(stream)]])
    recorder.muted += 1


def _leave_layers(recorder: Recorder, _module: nn.Module, _args: Any, output: Any) -> None:
    recorder.muted -= 1
    at = next(at for at, step in enumerate(recorder.steps) if step[0] == "layers")
    _, _, (stream,) = recorder.steps[at]
    # the loop's variable, which moves from layer to layer
    moves = ["drop", stream] in recorder.steps[at:]
    if moves:
        recorder.steps.remove(["drop", stream])
    recorder.steps[at] = ["layers", recorder.add(output[0] if isinstance(output, tuple) else output), [stream], moves]


def _enter_head(recorder: Recorder, _module: nn.Module, args: Any) -> None:
    recorder.steps.append(["head", -1, [recorder.operand(args[0])], 0])


def _loss(recorder: Recorder, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    logits = args[0] if args else kwargs["logits"]
    recorder.steps.append(["loss", -1, [recorder.operand(logits)], 0])
    loss = function(*args, **kwargs)
    for kind in ("loss", "head"):
        _close(recorder, kind, [loss])
    return loss


def _layer_sizes(spec: ModelSpec, index: int, rows: int, tokens: int) -> dict[int, str]:
    """The names of sizes in a layer; the first ones go before others of the same size."""
    sizes = [(name, size) for name, size in sizes_of(spec, index, rows, tokens).items() if size > 1]
    return {size: name for name, size in reversed(sizes) if name not in ("labels", "classes", *_ATTENTION_SIZES)}


def _looped(shorter: Sequence[Step], longer: Sequence[Step]) -> list[Step]:
    """The steps of the longer of two recordings of a loop, whose further turn is marked."""
    at = next(at for at, (step, other) in enumerate(zip(shorter, longer, strict=False)) if step != other)
    length, made = len(longer) - len(shorter), highest(longer) - highest(shorter)
    first = min(
        number
        for step in longer[at : at + length]
        if step[0] != "drop"
        for number in several(step[1])
        if number > max(highest(longer[:at]), 0)
    )
    return [*longer[: at + length], ["loop", first, made, length], *longer[at + length :]]


def highest(steps: Sequence[Step]) -> int:
    """The highest number of a value that the steps make."""
    return max(number for kind, results, *_ in steps if kind != "drop" for number in several(results))
