"""What cuDNN's recurrent layers allocate besides their results."""

from dataclasses import dataclass

CUDNN_VERSION = 91900
# of relu, tanh, LSTM and GRU
_GATES, _SAVED = (1, 1, 4, 3), (1, 1, 5, 6)
_WIDE = 1024
_SMALL_LAYER_BYTES = 8 << 20
_HEADER_BYTES = 256
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

    Reserve spaces are those of all 78 layers measured on an H200 with cuDNN 9; workspaces are within 10 % for most
    (benchmarks/results/recurrent-h200.jsonl).
    """
    gates, between = _GATES[problem.mode], problem.layers - 1
    elements = problem.directions * problem.rows * problem.hidden_size
    states_bytes = elements * problem.width
    outputs = problem.directions * (problem.projected_size or problem.hidden_size)
    inputs = problem.input_size + between * outputs + problem.layers * problem.hidden_size
    weights_bytes = problem.directions * gates * problem.hidden_size * inputs * problem.width
    workspace_bytes = (gates + 2 + between) * states_bytes + weights_bytes
    if problem.hidden_size < _WIDE:
        workspace_bytes += problem.layers * problem.directions * _SMALL_LAYER_BYTES
    if not train:
        return workspace_bytes, 0
    # a bit per output between layers that dropout keeps
    mask_bytes = between * problem.directions * elements // 8 if problem.dropout else 0
    return workspace_bytes, (
        problem.layers * _SAVED[problem.mode] + between
    ) * states_bytes + mask_bytes + _HEADER_BYTES


def dropout_state_bytes(sm_count: int) -> int:
    """cudnnDropoutGetStatesSize: a random generator for each thread."""
    return sm_count * _THREADS * _GENERATOR_BYTES
