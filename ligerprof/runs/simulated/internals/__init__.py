"""What CUDA's own implementation of an operator allocates and no dispatcher sees.

Each entry of INTERNALS runs an operator with the temporaries that its CUDA kernel takes, and names the file and
function of torch that takes them.
"""

from ligerprof.runs.simulated.internals.attention import ATTENTION_INTERNALS
from ligerprof.runs.simulated.internals.call import Call
from ligerprof.runs.simulated.internals.embeddings import EMBEDDING_INTERNALS
from ligerprof.runs.simulated.internals.foreach import FOREACH_INTERNALS
from ligerprof.runs.simulated.internals.indexing import INDEX_INTERNALS
from ligerprof.runs.simulated.internals.norms import NORM_INTERNALS
from ligerprof.runs.simulated.internals.products import PRODUCT_INTERNALS
from ligerprof.runs.simulated.internals.reductions import REDUCTION_INTERNALS
from ligerprof.runs.simulated.internals.scans import SCAN_INTERNALS

INTERNALS = {
    **ATTENTION_INTERNALS,
    **EMBEDDING_INTERNALS,
    **FOREACH_INTERNALS,
    **INDEX_INTERNALS,
    **NORM_INTERNALS,
    **PRODUCT_INTERNALS,
    **REDUCTION_INTERNALS,
    **SCAN_INTERNALS,
}

__all__ = ["INTERNALS", "Call"]
