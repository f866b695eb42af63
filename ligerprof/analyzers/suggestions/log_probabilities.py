"""The peak with log-probabilities straight from hidden states, as losses of policies and preferences need them."""

import re
from bisect import bisect_left

import numpy as np

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.fused_loss import LOSS_ROLES, find_loss_shape, heads_of_passes, kernel_memory
from ligerprof.analyzers.suggestions.replayed_change import Edit

# functions that return the label's log-probability, as TRL's `selective_log_softmax`
_FUNCTIONS = r":\w*(?:selective_log_softmax|log_?probs?|logps)(?:_\w+)?$"
_NORMALIZERS = frozenset({"log_softmax_int", "_log_softmax", "logsumexp"})
_CHOICES = frozenset({"gather", "gather_backward"})
_NODES = (re.compile(r"LogSoftmax|Logsumexp"), re.compile(r"^Gather"))


def takes_log_probabilities(case: Case) -> bool:
    """Whether a loss picks each label's log-probability, rather than torch's cross-entropy or a divergence."""
    sites = case.whole.call_sites.sites
    operators = frozenset().union(*(site.stack.operators for site in sites))
    has_operators = bool(operators & _NORMALIZERS and operators & _CHOICES)
    has_nodes = all(any(node.search(site.node) for site in sites) for node in _NODES)
    return has_operators or has_nodes or case.program.has_call(_FUNCTIONS)


def with_linear_log_probs(case: Case) -> Edit | None:
    """Remove logits and the loss's temporary tensors; add what the kernel allocates in forward and in backward.

    Where the recording does not show the head's sizes, the kernel counts as large as the largest of these tensors: it
    computes the logits of fewer tokens, in 16 bits if the products are.
    """
    edit, backwards = case.without(*LOSS_ROLES), case.backwards
    starts = [start for start, _ in backwards]
    spikes = []
    for head, end in heads_of_passes(case):
        shape = find_loss_shape(case, head)
        size_bytes = int(case.sizes([head])[0])
        forward_bytes = backward_bytes = size_bytes
        if shape is not None:
            memory = kernel_memory(shape, "ligerprof", weight_requires_grad=True, returns=("lse",))
            forward_bytes = memory.output_bytes + memory.forward_temporary_bytes
            backward_bytes = memory.backward_gradient_bytes + memory.backward_temporary_bytes
        spikes.append((int(case.replayed.allocated_by[head]) + 1, forward_bytes))
        following = bisect_left(starts, end)
        if following < len(starts):
            spikes.append((starts[following] + 1, backward_bytes))
    if not spikes:
        return None
    edit.spike(*np.array(spikes, dtype=np.int64).T)
    return edit
