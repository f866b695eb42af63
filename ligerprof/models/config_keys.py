"""What an architecture reads from a config: dropouts, softcaps, windows, and which layers have them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """The config key of a dropout probability or a softcap (null: none), and the number if the config lacks the key."""

    key: str
    default: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChoice:
    """Some of the decoder layers.

    Attributes:
        key: the config key of a list with an entry per layer.
        chosen: the entry of a chosen layer.
        instead: another such list, used if the first is not given: its key and the entry of a chosen layer.
        period: in each period of so many layers one is left out; None: `from_layer` decides, or all are chosen.
        period_key: the config key of the period.
        leaves_first: whether the first layer of a period is left out, rather than the last.
        from_layer: the config key of the first chosen layer, and its default.
        others: the config key of a list of the layers that are not chosen.
        without_others: whether all layers are chosen without that list, rather than none.
    """

    key: str = "layer_types"
    chosen: str | int = "sliding_attention"
    instead: tuple[str, str | int] | None = None
    period: int | None = None
    period_key: str | None = None
    leaves_first: bool = False
    from_layer: tuple[str, int] | None = None
    others: str | None = None
    without_others: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AdjustedWidth:
    """The config keys of a width of which two thirds are taken, times a factor, rounded up to a multiple.

    Attributes:
        switch: turns this on; it is on if the config lacks the key.
        factor: the factor; null: neither multiplied nor rounded.
        multiple: the multiple.
    """

    switch: str
    factor: str
    multiple: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseLayers:
    """The decoder layers that have experts. Each attribute that is None leaves out no layer.

    Attributes:
        first: the config key of the first such layer (None: no key), and its default.
        last: the config key of the last one, and its default; -1 is the model's last layer.
        every: the config key of a period whose last layer has experts, and its default.
        dense: the config key of a list of layers without experts.
        listed: the config key of a list of the layers with experts, which decides if it is given.
        kinds: the config key of a list with `sparse` or `dense` for each layer, which decides if it is given.
    """

    first: tuple[str | None, int] | None = None
    last: tuple[str, int] | None = None
    every: tuple[str, int] | None = None
    dense: str | None = None
    listed: str | None = None
    kinds: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow:
    """Which layers attend to a window of tokens only.

    Attributes:
        key: the config key of the window's size in tokens; null turns the window off.
        default: the size if the config lacks the key.
        switch: the config key that turns the window on; None if it is always on.
        layers: the layers with a window; None: all of them, with one mask.
    """

    key: str = "sliding_window"
    default: int | None = None
    switch: str | None = None
    layers: LayerChoice | None = None
