"""The supported architectures, one row per `model_type`."""

from dataclasses import replace

from ligerprof.models.architecture import Architecture, Attention
from ligerprof.models.composites import TEXT_MODELS
from ligerprof.models.config_keys import Softcap
from ligerprof.models.rows.dense import GEMMA_ROWS, LLAMA, LLAMA_ROWS, OTHER_ROWS
from ligerprof.models.rows.experts import BATCHED_ROWS, EXPERT_ROWS, LATENT_ROWS, SIGMOID_ROWS
from ligerprof.models.rows.mixers import DELTA_ROWS, SHORT_CONV_ROWS, STATE_SPACE_ROWS, STREAM_ROWS

ARCHITECTURES: dict[str, Architecture] = {
    row.model_type: row
    for row in (
        *LLAMA_ROWS,
        *GEMMA_ROWS,
        *OTHER_ROWS,
        *EXPERT_ROWS,
        *LATENT_ROWS,
        *BATCHED_ROWS,
        *DELTA_ROWS,
        *SIGMOID_ROWS,
        *SHORT_CONV_ROWS,
        *STATE_SPACE_ROWS,
        *STREAM_ROWS,
    )
}


# most models without a row resemble Llama; messages name the softcaps
_UNLISTED = replace(
    LLAMA,
    attention=Attention(softcap=Softcap(key="attn_logit_softcapping")),
    final_softcap=Softcap(key="final_logit_softcapping"),
)


def find_architecture(model_type: str) -> Architecture:
    """The row of a `model_type`; one without a row gets Llama's, and can be simulated and measured only."""
    return ARCHITECTURES.get(model_type) or TEXT_MODELS.get(model_type) or replace(_UNLISTED, model_type=model_type)


def can_patch(model_type: str) -> bool:
    """Whether a row says where kernels go in the architecture."""
    return model_type in ARCHITECTURES or model_type in TEXT_MODELS


def has_row(model_type: str) -> bool:
    """Whether the architecture has a row of its own."""
    return model_type in ARCHITECTURES
