"""The sizes of multi-head latent attention (MLA), read from a config."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """Ranks of the latents, and elements per head.

    Attributes:
        query_rank: of the query's latent; 0 if the query has none.
        key_rank: of the latent of key and value.
        plain_dim, rotated_dim: elements of query and key that are not rotated, and that are.
        value_dim: elements of the value.
    """

    query_rank: int
    key_rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int
