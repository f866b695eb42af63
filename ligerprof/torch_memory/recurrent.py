"""What cuDNN's recurrent layers allocate besides their results."""

from dataclasses import dataclass

CUDNN_VERSION = 91900
# cudnnDropoutGetStatesSize
DROPOUT_STATE_BYTES = 2 << 20


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
    """Bytes of workspace and reserve space (cudnnGetRNNTempSpaceSizes)."""
    states = problem.layers * problem.directions * problem.rows * problem.hidden_size * problem.width
    return states, states * 6 if train else 0
