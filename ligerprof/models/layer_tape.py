"""Tapes of decoders and their layers: the tensor operators of transformers' own code in order, recorded by a script.

`layer_tapes.json` has each different tape once, and for each architecture the tapes of the kinds of its layers, of
its norms and of what surrounds its layers.
`python -m benchmarks.layer_tapes` writes it.
"""

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ligerprof.errors import UnsupportedError
from ligerprof.models.spec import ModelSpec, ParameterShape

# of a layer: the number of a value, which is 0 for its input, or "p:" and the name of a parameter; from outside,
# tensors without a gradient: "wide" in fp32, "narrow" in the dtype of the residual stream, "complex"
Operand = int | str

# The kind of step, the number of its result or of several, its operands, and more about it:
#   linear, norm, bare norm, activate: the module's path
#   mixer: the path of a module that runs as a whole
#   gated, mixture: path of a module, and how many of the steps that follow are its own; others may be in their place
#   rotate: how many of the steps that follow rotate query and key; a kernel may be in their place
#   heads: a value seen as [batch, tokens, heads, head_dim], to be "rotated", "split" after its heads, or left "plain"
#   attend: of query, key and value
#   cut: the share of the source that a view has; split: views of so many equal parts, or of named ones
#   expand: a view with a copy for each head; empty, write: new memory, and a value written into a part of it
#   join: a new tensor of all operands
#   cast: "wide" to fp32, else the value whose dtype it takes; dropout: config key and default, or None and probability
#   product: `F.linear` with a weight, perhaps a bias, and whether autocast is on; grouped product, batch product
#   soften: whether in fp32; top, sum, repeat: the sizes of the result; index: the number of rows; gather, gather into,
#   mask out, place, divide, and "in place": of a value and indices, a mask or another value
#   function: an autograd function, and how many of its operands receive gradients; it saves the others
#   mean: one number for each row; multiply: with one for each of the "rows" or "columns" if it says so
#   new: sizes and dtype of a tensor without a gradient
#   add, subtract, power, negate, copy; keep input, keep output: elementwise functions by what backward needs
# And of a model, whose value 0 are the indices of the tokens:
#   embed: path, and whether the module scales its result
#   mask; tables: number of the kind of layers, and how many steps make them
#   layers: whether the variable of their input moves on; head, loss: how many of the steps that follow are its own
#   log softmax; nll: the mean loss and the weights' sum
# And ["drop", number]: the last Python variable of a tensor and its views ends. ["output", number] is the last step.
Step = Sequence[Any]

FILE = Path(__file__).with_name("layer_tapes.json")


def layer_tape(spec: ModelSpec, index: int) -> Sequence[Step]:
    """The tape of a decoder layer.

    Raises:
        UnsupportedError: no layer of its kind was recorded.
    """
    key = layer_kind(spec, index)
    found = next((tape for kind, tape in tapes_of(spec.model_type) if kind == key), None)
    if found is None:
        raise UnsupportedError(
            f"estimate: {spec.name} has layers of a kind that was not recorded ({', '.join(key)}). Use `ligerprof step"
            " --device simulated`."
        )
    return found


def tapes_of(model_type: str) -> Sequence[tuple[Sequence[str], Sequence[Step]]]:
    """The kinds of layers of an architecture, and the tape of each."""
    content = _content()
    return [(kind, content["tapes"][number]) for kind, number in content["architectures"].get(model_type, ())]


@cache
def layers_make_tables(model_type: str) -> bool:
    """Whether the layers of an architecture make rotary tables of their own."""
    return any(
        step[0] == "new" and {"half", "rotated"} & set(step[3]) for _, tape in tapes_of(model_type) for step in tape
    )


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
    tape: Sequence[Step] = content["tapes"][found]
    return tape


def model_kind(spec: ModelSpec) -> list[str]:
    """What decides which operators surround the layers of a model."""
    rotary = spec.architecture.attention.rotary
    flags = {
        "rotated": rotary is not None and (rotary.when is None or any(spec.layer_kinds.rotated)),
        "capped": spec.final_softcap is not None,
    }
    return [name for name, is_on in flags.items() if is_on]


def norm_tape(spec: ModelSpec, *, bare: bool = False) -> Sequence[Step]:
    """The tape of a norm in plain torch, with or without a weight."""
    content = _content()
    found: Sequence[Step] = content["tapes"][content["bare norms" if bare else "norms"][spec.model_type]]
    return found


def function_tape(name: str) -> Sequence[Step]:
    """The tape of an activation function of transformers, or of `rms_norm`, the reference of kernels."""
    content = _content()
    found: Sequence[Step] = content["tapes"][content["functions"][name]]
    return found


def activation_functions() -> list[str]:
    """The activation functions that have a tape, by transformers' names."""
    return [name for name in _content()["functions"] if name != "rms_norm"]


def layer_kind(spec: ModelSpec, index: int) -> list[str]:
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
    }
    return [*(name for name, is_on in flags.items() if is_on), *modules]


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
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content
