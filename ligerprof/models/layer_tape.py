"""Tapes of decoders and their layers: the tensor operators of transformers' own code in order, recorded by a script.

`layer_tapes.json` has each different tape once, and for each architecture the tapes of the kinds of its layers, of
its norms and of what surrounds its layers.
`python -m benchmarks.layer_tapes` writes it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ligerprof.errors import UnsupportedError
from ligerprof.models.mixers import CHUNK_TOKENS
from ligerprof.models.spec import ModelSpec, ParameterShape

# of a layer: the number of a value, which is 0 for its input, or "p:" and the name of a parameter; from outside,
# tensors without a gradient: "wide" in fp32, "narrow" in the dtype of the residual stream, "complex"
Operand = int | str

# The kind of step, the number of its result or of several, its operands, and more about it:
#   linear, norm, bare norm, activate: the module's path
#   gated, mixture: path of a module, and how many of the steps that follow are its own; others may be in their place.
#     In between, of a mixture: whether a gated product reads the same view of the tokens
#   rotate: how many of the steps that follow rotate query and key; a kernel may be in their place
#   heads: a value seen as [batch, tokens, heads, head_dim], to be "rotated", "split" after its heads, or left "plain"
#   attend: of query, key and value, and whether the heads of query and key lie apart
#   cut: the share of the source that a view has, or its sizes; split: views of so many equal parts, or of named ones
#   expand: a view with a copy for each head, or of sizes; empty, write: new memory, and a value written into a part
#   turn: a view of all elements whose gradient is copied
#   join: a new tensor of all operands
#   cast: "wide" to fp32, "half" to what autocast's products return, or the value or weight whose dtype it takes
#   dropout: config key and default, or None and probability
#   product: `F.linear` with a weight, perhaps a bias, and whether autocast is on; grouped product, batch product
#   layer norm: `F.layer_norm`, perhaps with weight and bias, and whether autocast is on
#   part: one expert's part of a parameter; part product: of so many rows with one, and whether by `F.linear`
#   soften: "wide", or the value whose dtype it has; top, sum, repeat: sizes of the result; index: the number of rows,
#   and of chosen ones if an expert's are; gather, gather into, mask out, place, divide, and "in place": of a value and
#   indices, a mask or another value; find: sizes of positions and of the numbers that they are in, and whether those
#   are contiguous
#   function: an autograd function, and how many of its operands receive gradients; it saves the others
#   autocast: what autocast passes to a product; product of values: sizes of a batch of products; convolve: the path
#   unpad: a product with the mask of tokens; pad: sizes; cumulate: a running sum; solve: of a triangular system
#   loop: the first value, number of values and number of steps of what runs again for each further chunk of tokens, or
#     for each further expert, whose tokens are "routed"; "hits" experts have some
#   skip: the value that a loop carries from chunk to chunk, and how many chunks to leave out, or 0 before one to go by
#   mean: one number for each row; multiply: with one for each of the "rows" or "columns" if it says so
#   new: sizes and dtype of a tensor without a gradient
#   add, subtract, power, negate, copy; keep input, keep output: elementwise functions by what backward needs
# And of a model, whose value 0 are the indices of the tokens:
#   embed: path, and whether the module scales its result
#   mask: the function that makes it; tables: number of the kind of layers, and how many steps make them
#   layers: whether the variable of their input moves on; head, loss: how many of the steps that follow are its own
#   log softmax; nll: the mean loss and the weights' sum
# And ["drop", number]: the last Python variable of a tensor and its views ends. ["output", number] is the last step.
Step = Sequence[Any]

# chunks of tokens that the shortest loop over them has
LOOPS = 2
# of the chunks after these
_MOST_TURNS = 4


# functions that kernels are compared with; rotations by tables in the dtype of the residual stream, or in fp32
_REFERENCES = ("rms_norm", "rope", "rope fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What decides how mixers of tokens lay out their tensors, besides the model.

    Attributes:
        rows, tokens: sequences, and tokens of each.
        wide: whether their projections compute in fp32.
    """

    rows: int = 2
    tokens: int = 1
    wide: bool = False


# the function that makes the mask of layers without a window
PLAIN_MASK = "create_causal_mask"

FILE = Path(__file__).with_name("layer_tapes.json")


def layer_tape(spec: ModelSpec, index: int, batch: Batch) -> Sequence[Step]:
    """The tape of a decoder layer.

    Raises:
        UnsupportedError: no layer of its kind was recorded.
    """
    key = layer_kind(spec, index, batch)
    kinds = _content()["architectures"].get(spec.model_type, ())
    found = next((number for kind, number in kinds if kind == key), None)
    if found is None:
        raise UnsupportedError(
            f"estimate: {spec.name} has layers of a kind that was not recorded ({', '.join(key)}). Use `ligerprof step"
            " --device simulated`."
        )
    return _tape(found)


def tapes_of(model_type: str) -> Sequence[tuple[Sequence[str], Sequence[Step]]]:
    """The kinds of layers of an architecture, and the tape of each."""
    return [(kind, _tape(number)) for kind, number in _content()["architectures"].get(model_type, ())]


@cache
def layers_make_tables(model_type: str) -> bool:
    """Whether the layers of an architecture make rotary tables of their own."""
    return any(
        step[0] == "new" and {"half", "rotated"} & set(step[3]) for _, tape in tapes_of(model_type) for step in tape
    )


def attention_tape(spec: ModelSpec, rows: int, *, apart: bool) -> Sequence[Step]:
    """The tape of eager attention: of query, key, value and mask, to the output as rows and the probabilities.

    Args:
        rows: sequences.
        apart: whether the heads of query and key lie apart.
    """
    return _tape(_content()["attention"][spec.model_type][attention_kind(spec, rows, apart=apart)])


def attention_kind(spec: ModelSpec, rows: int, *, apart: bool) -> str:
    """What decides which operators eager attention runs, and which tensors it copies."""
    flags = {
        "capped": spec.attention_softcap is not None,
        "one row": rows == 1,
        "one head": spec.heads == 1,
        "one key head": spec.heads > spec.kv_heads == 1,
        "repeated": spec.heads > spec.kv_heads > 1,
        "apart": apart and rows > 1 and spec.heads > 1,
    }
    return " ".join(name for name, is_on in flags.items() if is_on)


def mask_tape(function: str, kind: str) -> Sequence[Step]:
    """The tape of a function of transformers that makes a mask; of no output if it makes none."""
    return _tape(_content()["masks"][function][kind])


def mask_kind(*, hides: str, filled: bool, eager: bool) -> str:
    """What decides what such a function makes.

    Args:
        hides: "padding", other "documents", or neither.
        filled: whether a sequence has as many tokens as the window.
    """
    return " ".join(name for name in (hides, "filled" * filled, "eager" * eager) if name)


def masks_of(spec: ModelSpec) -> dict[bool, str]:
    """The functions that make a decoder's masks, by whether their layers have a window."""
    names = (step[3] for step in model_tape(spec) if step[0] == "mask")
    return {name != PLAIN_MASK: name for name in names}


def model_tape(spec: ModelSpec) -> Sequence[Step]:
    """The tape of what surrounds the decoder layers.

    Raises:
        UnsupportedError: no model with these switches was recorded.
    """
    content, key = _content(), model_kind(spec)
    found = next((number for kind, number in content["models"].get(spec.model_type, ()) if kind == key), None)
    if found is None:
        raise UnsupportedError(
            f"estimate: no {spec.model_type} of this kind was recorded ({', '.join(key) or 'plain'}). Use `ligerprof"
            " step --device simulated`."
        )
    return _tape(found)


def model_kind(spec: ModelSpec) -> list[str]:
    """What decides which operators surround the layers of a model."""
    rotary = spec.architecture.attention.rotary
    flags = {
        "rotated": rotary is not None and (rotary.when is None or any(spec.layer_kinds.rotated)),
        "capped": spec.final_softcap is not None,
        "windowed": any(spec.layer_kinds.windowed),
    }
    return [name for name, is_on in flags.items() if is_on]


def norm_tape(spec: ModelSpec, *, bare: bool = False) -> Sequence[Step]:
    """The tape of a norm in plain torch, with or without a weight."""
    return _tape(_content()["bare norms" if bare else "norms"][spec.model_type])


def function_tape(name: str) -> Sequence[Step]:
    """The tape of an activation function of transformers, or of a reference of kernels."""
    return _tape(_content()["functions"][name])


@lru_cache(maxsize=16)
def experts_tape(model_type: str, routed: tuple[int, ...]) -> Sequence[Step]:
    """The tape of experts that run one after another, each with so many tokens: of tokens, choices and scores."""
    return list(in_turn(_tape(_content()["experts"][model_type]), routed))


def activation_functions() -> list[str]:
    """The activation functions that have a tape, by transformers' names."""
    return [name for name in _content()["functions"] if name not in _REFERENCES]


def layer_kind(spec: ModelSpec, index: int, batch: Batch) -> list[str]:
    """What decides which operators a layer runs: its modules with parameters, its kind and the config's switches."""
    kinds, row = spec.layer_kinds, spec.architecture
    modules = _modules(_Parameters(spec.parameters), row.layers).get(index, ())
    experts = row.mlp.experts if kinds.sparse[index] else None
    switches = {**row.switches, **({} if experts is None else {**experts.switches, experts.noise: False})}
    flags = {
        "rotated": kinds.rotated[index],
        "sparse": kinds.sparse[index],
        "recurrent": kinds.recurrent[index],
        **{key: _is_on(spec, key, default) for key, default in switches.items() if key is not None},
        **(_mixer_kind(spec, batch) if kinds.recurrent[index] or mixes_beside_attention(spec) else {}),
    }
    return [*(name for name, is_on in flags.items() if is_on), *modules]


def mixes_beside_attention(spec: ModelSpec) -> bool:
    """Whether each layer has a mixer of tokens next to attention."""
    mixer = spec.architecture.mixer
    return mixer is not None and mixer.layers is None


def _mixer_kind(spec: ModelSpec, batch: Batch) -> dict[str, bool]:
    chunk, delta = _chunk(spec), spec.delta
    whole = chunk is not None and batch.tokens % chunk == 0
    return {
        "one row": batch.rows == 1,
        "one chunk": chunk is not None and batch.tokens <= chunk,
        "whole chunks": whole,
        "one head": delta is not None and delta.key_heads == 1,
        "repeated": delta is not None and delta.repeats > 1,
        # padding or a cast to fp32 lays tensors out anew
        "wide": delta is not None and batch.wide and whole,
    }


def _chunk(spec: ModelSpec) -> int | None:
    if spec.state_space is not None:
        return spec.state_space.chunk
    return None if spec.delta is None else CHUNK_TOKENS


def sizes_of(spec: ModelSpec, index: int, rows: int, tokens: int) -> dict[str, int]:
    """The sizes that the steps of a layer name; of mixers of tokens first."""
    batch, groups = rows * tokens, int(spec.setting("n_group") or 1)
    mixes = spec.layer_kinds.recurrent[index] or mixes_beside_attention(spec)
    return {
        **(dict(_mixer_sizes(spec, tokens)) if mixes else {}),
        "copies": batch * spec.experts,
        "pairs": batch * spec.chosen_experts,
        "chosen": spec.chosen_experts,
        "every": spec.experts,
        "classes": spec.experts + 1,
        "half": spec.rotary_dim // 2,
        "rotated": spec.rotary_dim,
        "hidden": spec.hidden_size,
        "batch": batch,
        "tokens": tokens,
        "rows": rows,
        "in group": spec.experts // groups,
        "groups": groups,
        "labels": tokens + 1,
        "heads": spec.heads,
        "kv heads": spec.kv_heads,
        "heads per kv": spec.heads // spec.kv_heads,
        "head": spec.head_dim,
        "head value": spec.value_dim,
    }


def _mixer_sizes(spec: ModelSpec, tokens: int) -> Iterator[tuple[str, int]]:
    chunk, states, delta = _chunk(spec), spec.state_space, spec.delta
    chunks = 0 if chunk is None else -(-tokens // chunk)
    if chunk is not None:
        yield from (("chunk", chunk), ("chunks", chunks), ("padded", chunks * chunk))
    if states is not None:
        yield from (("ends", chunks + 1), ("states", states.states), ("head states", states.state))
        yield from (("inner", states.inner), ("convolved", states.convolved), ("value", states.head_dim))
        yield from (("state groups", states.groups), ("repeats", states.heads // states.groups))
        yield "value heads", states.heads
    if delta is not None:
        yield from (("keys", delta.keys), ("values", delta.values), ("convolved", 2 * delta.keys + delta.values))
        yield from (("key", delta.key_dim), ("value", delta.value_dim))
        yield from (("key heads", delta.key_heads), ("value heads", delta.value_heads), ("repeats", delta.repeats))


def unrolled(steps: Sequence[Step], chunks: int) -> Iterator[Step]:
    """The steps with those of a loop over chunks of tokens as often as it runs, or all but some in the middle."""
    at = next((at for at, step in enumerate(steps) if step[0] == "loop"), None)
    if at is None:
        yield from steps
        return
    _, first, made, length = steps[at]
    body, turns = steps[at - length : at], chunks - LOOPS
    run = min(turns, _MOST_TURNS)
    yield from steps[: at - length]
    for turn in range(run):
        if turns > run and turn in (_MOST_TURNS // 2 - 1, _MOST_TURNS // 2):
            read = (number for step in body if step[0] != "drop" for number in step[2] if isinstance(number, int))
            carried = min(number for number in read if number >= first - made)
            yield ["skip", carried + turn * made, [], turns - run if turn == _MOST_TURNS // 2 else 0]
        # what a turn reads of the turn before it moves as well
        yield from (moved(step, first - made, turn * made) if turn else step for step in body)
    yield from (moved(step, first, (run - 1) * made) for step in steps[at + 1 :])


def in_turn(steps: Sequence[Step], routed: Sequence[int | str]) -> Iterator[Step]:
    """The steps of experts that run one after another, each with so many tokens."""
    at = next(at for at, step in enumerate(steps) if step[0] == "loop")
    _, first, made, length = steps[at]
    before, body, after = steps[: at - length], steps[at - length : at], steps[at + 1 :]
    hits = len(routed)
    yield from (sized(step, hits=hits, routed=routed[0]) for step in before)
    for turn, tokens in enumerate(routed[1:]):
        # a variable that the turn before has set ends in this one
        yield from (sized(moved(step, first - made, turn * made), routed=tokens) for step in body)
    yield from (moved(step, first, (hits - 2) * made) for step in after)


def sized(step: Step, **sizes: int | str) -> Step:
    """A step with numbers for some names of sizes."""
    kind, results, *rest = step
    return [
        kind,
        results,
        *([sizes.get(name, name) for name in item] if isinstance(item, list) else item for item in rest),
    ]


def moved(step: Step, first: int, by: int) -> Step:
    """A step of a later turn of a loop, whose values from this one on have higher numbers."""

    def number(item: Any) -> Any:
        if isinstance(item, list):
            return [number(each) for each in item]
        return item + by if isinstance(item, int) and item >= first else item

    kind, results, *rest = step
    operands, details = rest[:1], rest[1:]
    if kind in ("cast", "new", "soften"):
        details = [*details[:-1], number(details[-1])]
    return [kind, number(results), *(number(item) for item in operands), *details]


def _is_on(spec: ModelSpec, key: str, default: bool | str) -> bool:
    return bool(spec.setting(key) == default if isinstance(default, str) else spec.setting(key, default))


class _Parameters:
    """Parameters of a model as a key, which is the same for the same tuple only."""

    def __init__(self, items: tuple[ParameterShape, ...]) -> None:
        self.items = items

    def __hash__(self) -> int:
        return id(self.items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Parameters) and self.items is other.items


@lru_cache(maxsize=16)
def _modules(parameters: _Parameters, layers: str) -> dict[int, list[str]]:
    """The paths of the modules with parameters in each layer, sorted."""
    found: dict[int, set[str]] = {}
    for item in parameters.items:
        if item.name.startswith(f"{layers}."):
            index, _, name = item.name.removeprefix(f"{layers}.").partition(".")
            found.setdefault(int(index), set()).add(name.rpartition(".")[0])
    return {index: sorted(names) for index, names in found.items()}


@cache
def _texts() -> tuple[list[str], str]:
    """The tapes, one on each line, and the rest of the file: a model needs few of them."""
    tapes, end, rest = FILE.read_text(encoding="utf-8").removeprefix('{"tapes":[').partition("\n],")
    assert end
    return [line.removesuffix(",") for line in tapes.splitlines() if line], "{" + rest


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_texts()[1])
    return content


@cache
def _tape(number: int) -> Sequence[Step]:
    tape: Sequence[Step] = json.loads(_texts()[0][number])
    return tape
