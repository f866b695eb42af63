"""What cuDNN's recurrent layers allocate besides their results."""

from dataclasses import dataclass

CUDNN_VERSION = 91900
# of relu, tanh, LSTM and GRU
_GATES = (1, 1, 4, 3)
_THREADS, _GENERATOR_BYTES = 2048, 24


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayers:
    """Layers of one call.

    Attributes:
        mode: cudnnRNNMode_t: 0 relu, 1 tanh, 2 LSTM, 3 GRU.
        steps: the longest sequence.
        batch: sequences.
        rows: steps of all sequences together.
        projected_size: of the LSTM's state, 0 if it is not projected.
        directions: 2 if bidirectional.
        width: bytes per element.
    """

    mode: int
    steps: int
    batch: int
    rows: int
    input_size: int
    hidden_size: int
    projected_size: int
    layers: int
    directions: int
    dropout: float
    width: int


def spaces(problem: RecurrentLayers, *, train: bool) -> tuple[int, int]:
    """Bytes of workspace and reserve space (cudnnGetRNNTempSpaceSizes).

    The sizes of one LSTM of three layers were measured; those of other modes and shapes are derived from it.
    """
    gates = _GATES[problem.mode]
    states_bytes = problem.directions * problem.rows * problem.hidden_size * problem.width
    workspace_bytes = (2 * gates + 3) * states_bytes
    if not train:
        return workspace_bytes, 0
    # gates and cells of each layer, outputs of all but the last, and a bit per output that dropout keeps
    between = problem.layers - 1
    mask_bytes = between * states_bytes // (8 * problem.width) if problem.dropout else 0
    return workspace_bytes, (problem.layers * (gates + 1) + between) * states_bytes + mask_bytes


def dropout_state_bytes(sm_count: int) -> int:
    """cudnnDropoutGetStatesSize: a random generator for each thread."""
    return sm_count * _THREADS * _GENERATOR_BYTES
