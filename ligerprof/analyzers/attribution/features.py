"""The features that rules match on."""

from dataclasses import dataclass
from enum import Enum, auto

from ligerprof.roles import Phase


class Feature(Enum):
    """A property of a block that its stack alone does not show."""

    # lifetime
    DIES_IN_PHASE = auto()
    OUTLIVES_PHASE = auto()
    OUTLIVES_LAYER = auto()
    NEVER_FREED = auto()
    KEPT_BEFORE = auto()
    KEPT_SO_FAR = auto()
    UNFINISHED = auto()
    DROPPED_BEFORE = auto()
    # size
    WEIGHT_SIZED = auto()
    UNLIKE_FORWARD = auto()
    UNLIKE_WEIGHTS = auto()
    GATHERED_SIZED = auto()
    HALF_WEIGHT_SIZED = auto()
    HEAD_WEIGHT_SIZED = auto()
    LOGITS_SIZED = auto()
    SCORES_SIZED = auto()
    SHIFTED_LOGITS_SIZED = auto()
    VOCABULARY_SIZED = auto()
    FIRST_WORKSPACE = auto()
    SMALL = auto()
    # place in the program
    RECOMPUTED = auto()
    CHECKPOINTING = auto()
    SELECTED = auto()
    REGION_INPUT = auto()
    OUTSIDE_REGIONS = auto()
    IN_LAYER = auto()
    AFTER_LAYERS = auto()
    IN_EMBEDDING = auto()
    IN_HEAD = auto()
    IN_LOSS_AREA = auto()
    VOCABULARY_LOSS = auto()
    FIRST_COPY = auto()
    IN_MODEL_BODY = auto()
    FIRST_OF_CALL = auto()
    LAST_OF_CALL = auto()
    CASTS_GRADIENTS = auto()
    CAST_OF_GRADIENT = auto()
    CAST_OF_OTHER_GRADIENT = auto()
    BY_PRODUCT = auto()
    APPLIED = auto()
    ONLY_OF_CALL = auto()
    CAST_ARGUMENT = auto()
    DIES_IN_CALL = auto()
    ATTENTION_SCORES = auto()
    IN_CACHE = auto()
    FEEDS_PASS = auto()
    FOLLOWS_PASS = auto()
    OLDER_WEIGHT = auto()
    OLDER_MODEL = auto()
    COPIES_WEIGHTS = auto()
    MASTER_OF_WEIGHTS = auto()
    LIKE_WEIGHTS = auto()
    # buffers and gradients of a data-parallel wrapper
    REDUCED = auto()
    REDUCTION_INPUT = auto()
    GRADIENT_PARTITION = auto()
    FLAT_WEIGHTS = auto()
    MASTER_COPY = auto()
    BUCKETS_HOLD_GRADIENTS = auto()
    STAMPED_WITHOUT_CALLS = auto()

    # the hash of Enum is a Python function, and sets of features are built and compared for every block
    __hash__ = object.__hash__


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFeatures:
    """The input of the rules.

    Attributes:
        phase: None if unknown.
        stack: Python calls as lines of `file:function`, innermost first.
        inner_stack: the part of `stack` below the innermost call of a module.
        native: C++ functions, one per line.
        node: the autograd node that ran, or "".
        module: dotted name, "" if unknown.
    """

    phase: Phase | None
    stack: str
    inner_stack: str
    native: str
    node: str
    features: frozenset[Feature]
    module: str = ""
