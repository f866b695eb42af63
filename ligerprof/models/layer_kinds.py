"""Which decoder layers have an attention window and which rotate query and key, read from a config."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.errors import UnknownModelError
from ligerprof.models.architecture import Architecture
from ligerprof.models.config_keys import LayerChoice, SparseLayers
from ligerprof.models.mixers import reusing, thinned
from ligerprof.text import short_repr

# _LEGACY_LAYER_TYPE_REMAP in transformers' configuration_utils.py
_RENAMED = {"mamba": "linear_attention", "attention": "full_attention"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKinds:
    """How the decoder layers of a model differ, with an entry per layer.

    Attributes:
        window_tokens: size of the attention window, or None.
        windowed: whether a layer attends to a window of tokens only.
        rotated: whether a layer rotates query and key.
        sparse: whether a layer has a mixture of experts.
        recurrent: whether a layer has a gated delta net, a short convolution or a Mamba-2 mixer instead of attention.
        reusing: whether a layer reuses keys and values of a layer before it.
        thinned: whether a layer sets most gates of its MLP to zero.
    """

    window_tokens: int | None
    windowed: tuple[bool, ...]
    rotated: tuple[bool, ...]
    sparse: tuple[bool, ...]
    recurrent: tuple[bool, ...]
    reusing: tuple[bool, ...]
    thinned: tuple[bool, ...]

    @property
    def examples(self) -> tuple[int, ...]:
        """The first layer of each kind."""
        first: dict[tuple[object, ...], int] = {}
        kinds = (self.windowed, self.rotated, self.sparse, self.recurrent, self.reusing, self.thinned)
        for index, kind in enumerate(zip(*kinds, strict=True)):
            first.setdefault(kind, index)
        return tuple(first.values())


def layer_kinds(row: Architecture, config: Mapping[str, Any], layers: int) -> LayerKinds:
    """The kinds of all layers.

    Raises:
        UnknownModelError: a list of layers or a period that the config gives is not one.
    """
    tokens = _window_tokens(row, config)
    window, rotary = row.attention.window, row.attention.rotary
    windowed = (False,) * layers
    if window is not None and tokens is not None:
        windowed = _chosen(row, window.layers, config, layers)
    rotated = (False,) * layers
    if rotary is not None and (rotary.when is None or row.setting(config, rotary.when[0]) == rotary.when[1]):
        rotates_all = rotary.only_with_window is None or (rotary.only_with_window == "unless off" and tokens is None)
        rotated = windowed if not rotates_all else _chosen(row, rotary.layers, config, layers)
    sparse = _with_experts(row, config, layers)
    mixer = row.delta or row.short_conv or row.state_space
    instead = None if mixer is None else mixer.layers
    recurrent = (False,) * layers if instead is None else _chosen(row, instead, config, layers)
    streams = row.streams
    return LayerKinds(
        window_tokens=tokens,
        windowed=windowed,
        rotated=rotated,
        sparse=sparse,
        recurrent=recurrent,
        reusing=(False,) * layers
        if streams is None
        else reusing(row.setting(config, streams.shared), windowed, streams.shared),
        thinned=(False,) * layers if streams is None else thinned(streams, config, layers),
    )


def _with_experts(row: Architecture, config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    experts = row.mlp.experts
    if experts is None or experts.are_left_out(config):
        return (False,) * layers
    kinds = None if experts.layers is None else experts.layers.kinds
    if kinds is not None and row.setting(config, kinds) is not None:
        return _chosen(row, LayerChoice(key=kinds, chosen="sparse"), config, layers)
    return tuple(_sparse(row, config, layers))


def _sparse(row: Architecture, config: Mapping[str, Any], layers: int) -> Iterator[bool]:
    """Whether each layer has a mixture of experts, in an architecture that has them."""
    choice = SparseLayers() if row.mlp.experts is None else row.mlp.experts.layers or SparseLayers()

    def number(key: tuple[str | None, int] | None, default: int, smallest: int = 0) -> int:
        name, assumed = key or (None, default)
        return assumed if name is None else _number(name, row.setting(config, name, assumed), smallest=smallest)

    first, last = number(choice.first, 0), number(choice.last, -1, smallest=-1)
    every = number(choice.every, 1, smallest=1)
    if choice.listed is not None and (found := row.setting(config, choice.listed)) is not None:
        if not isinstance(found, list):
            raise UnknownModelError(f"{choice.listed!r} is {short_repr(found)}, not a list of layers. Fix the config.")
        yield from (index in found for index in range(layers))
        return
    dense = (row.setting(config, choice.dense) if choice.dense is not None else None) or ()
    if not isinstance(dense, (list, tuple)):
        raise UnknownModelError(f"{choice.dense!r} is {short_repr(dense)}, not a list of layers. Fix the config.")
    for index in range(layers):
        yield (
            first <= index <= (last % layers if last < 0 else last) and (index + 1) % every == 0 and index not in dense
        )


def _window_tokens(row: Architecture, config: Mapping[str, Any]) -> int | None:
    window = row.attention.window
    if window is None or (window.switch is not None and not row.setting(config, window.switch)):
        return None
    tokens = row.setting(config, window.key, window.default)
    return tokens if isinstance(tokens, int) else None


def _chosen(row: Architecture, choice: LayerChoice | None, config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if choice is None:
        return (True,) * layers
    for key, chosen in ((choice.key, choice.chosen), *(() if choice.instead is None else (choice.instead,))):
        # an empty list is what a config without the key means
        if (listed := row.setting(config, key)) not in (None, []):
            if not isinstance(listed, list) or len(listed) < layers:
                raise UnknownModelError(f"{key!r} is not a list of {layers} entries. Fix the config.")
            return tuple(_renamed(entry) == chosen for entry in listed[:layers])
    if choice.others is not None:
        return _all_but(row, choice.others, config, layers, without=choice.without_others)
    if choice.from_layer is not None:
        first = row.setting(config, *choice.from_layer)
        return tuple(index >= _number(choice.from_layer[0], first) for index in range(layers))
    if choice.period is None:
        return (True,) * layers
    period = choice.period
    if choice.period_key is not None:
        period = _number(choice.period_key, row.setting(config, choice.period_key, period), smallest=1)
    left_out = 0 if choice.leaves_first else period - 1
    return tuple(index % period != left_out for index in range(layers))


def _renamed(entry: object) -> object:
    return _RENAMED.get(entry, entry) if isinstance(entry, str) else entry


def _all_but(row: Architecture, key: str, config: Mapping[str, Any], layers: int, *, without: bool) -> tuple[bool, ...]:
    listed = row.setting(config, key)
    if listed is None:
        return (without,) * layers
    if not isinstance(listed, list):
        raise UnknownModelError(f"{key!r} is {short_repr(listed)}, not a list of layers. Fix the config.")
    named = {entry for entry in listed if isinstance(entry, int)}
    return tuple(index not in named for index in range(layers))


def _number(key: str, value: object, *, smallest: int = 0) -> int:
    if not isinstance(value, int) or value < smallest:
        raise UnknownModelError(f"{key!r} is {short_repr(value)}, not an integer from {smallest}. Fix the config.")
    return value
