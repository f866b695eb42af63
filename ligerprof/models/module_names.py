"""Classify modules and parameters of any model by dotted name: decoder layer, embedding, head, attention."""

import re
from functools import lru_cache

from ligerprof.models.architectures import ARCHITECTURES


def _last_names(*dotted: str | None) -> set[str]:
    return {name.rpartition(".")[2] for name in dotted if name is not None}


_ROWS = ARCHITECTURES.values()
# the literal names are of architectures without a row: GPT-NeoX, Bloom, Falcon, MPT
_LAYER_LISTS = _last_names("blocks", *(row.layers for row in _ROWS))
_TOKEN_EMBEDDINGS = tuple(sorted(_last_names("embed_in", "word_embeddings", *(row.embedding for row in _ROWS))))
_POSITIONS = _last_names(*(row.positions for row in _ROWS))
_HEADS = tuple(sorted(_last_names("embed_out", *(row.head for row in _ROWS))))
_ATTENTIONS = tuple(sorted({row.attention.name for row in _ROWS}))
_LAYER = re.compile(rf"^(?:(.*?)\.)?(?:{'|'.join(sorted(_LAYER_LISTS))})\.(\d{{1,4}})(?:\.|$)")


def layer_index(name: str) -> int | None:
    """Index of the decoder layer that a module or parameter belongs to, or None."""
    match = _LAYER.match(name)
    return int(match.group(2)) if match else None


def is_in_layer(name: str) -> bool:
    """Whether a module or parameter belongs to a decoder layer."""
    return layer_index(name) is not None


@lru_cache(maxsize=10_000)
def without_indices(name: str) -> str:
    """A name with `*` instead of each index: `layers.*.mlp` for `layers.3.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def body_of_layer(module: str) -> str | None:
    """Name of the module that holds the list of decoder layers if `module` is a decoder layer, else None."""
    match = _LAYER.match(module)
    return match.group(1) or "" if match and match.end() == len(module) else None


def is_token_embedding(module: str) -> bool:
    """Whether a module is the embedding of tokens."""
    return module.endswith(_TOKEN_EMBEDDINGS)


def is_embedding_weight(parameter: str) -> bool:
    """Whether a parameter belongs to an embedding of tokens or positions."""
    return not _POSITIONS.union(_TOKEN_EMBEDDINGS).isdisjoint(parameter.split("."))


def is_head(module: str) -> bool:
    """Whether a module is the output layer."""
    return module.endswith(_HEADS)


def is_attention(module: str) -> bool:
    """Whether a module is a layer's attention."""
    return module.endswith(_ATTENTIONS)
