"""The peak with torch.no_grad() around the forward passes that no backward pass follows, as those of an evaluation."""

import re

import numpy as np

from ligerprof.analyzers.attribution.layers import NO_LAYER
from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.replayed_change import Edit
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.distinct import Flags, distinct, is_among
from ligerprof.snapshots.trace import Int64s

# what autograd saves outside of layers
_LOSS_ROLES = (Role.ACTIVATIONS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES)
# programs collect fewer tensors of each layer: keys, values, attention weights, hidden states
_LEAST_PLACES = 5
# a function of the script; what it computes may outlive the recording
_EVALUATES = re.compile(r":(?:\w+_)?(?:eval|evaluate|evaluation|validate|validation)(?:_\w+)?$", re.MULTILINE)


def without_graphs(case: Case) -> Edit | None:
    """End what layers keep for a backward pass that does not run when each layer's forward pass ends."""
    passes = case.passes
    blocks, pass_of, held = case.once(_held_blocks)
    if not held.any():
        return None
    replayed, spans, edit = case.replayed, case.attribution.phases.spans, case.edit()
    saved, saved_by = blocks[held], pass_of[held]
    # a layer's output is the next one's input
    is_output = passes.output[saved_by] == saved
    is_last = np.append(passes.span[1:] != passes.span[:-1], True)
    until = np.where(
        is_output & ~is_last[saved_by], passes.end[np.minimum(saved_by + 1, len(passes) - 1)], passes.end[saved_by]
    )
    edit.end(saved, until + 1)
    # the loss lies behind the layers
    others = case.book.blocks(*_LOSS_ROLES)
    others = others[~is_among(others, blocks)]
    of_span = case.attribution.phases.spans_of(replayed.allocated_by[others])
    chosen = is_among(of_span, distinct(passes.span[saved_by])) & ~_ends_in_backward(case, others)
    others = others[chosen]
    edit.end(others, np.searchsorted(spans, of_span[chosen], "right") + 1)
    return edit


def _held_blocks(case: Case) -> tuple[Int64s, Int64s, Flags]:
    """The blocks of layers' forward passes, the pass of each, and whether a graph without backward holds it."""
    replayed, passes, phases = case.replayed, case.passes, case.attribution.phases
    in_forward = phases.codes_of(replayed.allocated_by) == phase_code(Phase.FORWARD)
    blocks = np.flatnonzero(in_forward & (case.attribution.layers != NO_LAYER)).astype(np.int64)
    pass_of = np.searchsorted(passes.first, replayed.allocated_by[blocks], "right") - 1
    freed = replayed.freed_by[blocks]
    kept = (freed < 0) | (freed > passes.end[pass_of])
    ends_in_backward = kept & _ends_in_backward(case, blocks)
    sites = case.attribution.call_sites
    chains = [site.stack.script_calls for site in sites.sites]
    trains = {chains[site] for site in distinct(sites.site_of[blocks[ends_in_backward]]).tolist()}
    evaluates = sites.at(lambda site: _EVALUATES.search(site.stack.text) is not None)[blocks]
    evaluates |= is_among(blocks, case.evaluation)
    differs = np.array([chain not in trains for chain in chains], dtype=bool)[sites.site_of[blocks]]
    held = kept & ~ends_in_backward & np.where(freed < 0, evaluates, differs | evaluates)
    # a pass that ran out of memory has no backward pass either
    failures = np.array(replayed.failures, dtype=np.int64)
    failed = np.searchsorted(failures, passes.end[pass_of]) != np.searchsorted(failures, freed)
    held &= evaluates | ~failed
    places = distinct(pass_of[held] * (int(sites.place_of.max(initial=0)) + 1) + sites.place_of[blocks[held]])
    counts = np.bincount(places // (int(sites.place_of.max(initial=0)) + 1), minlength=len(passes))
    return blocks, pass_of, held & (counts[pass_of] >= _LEAST_PLACES)


def _ends_in_backward(case: Case, blocks: Int64s) -> Flags:
    """Whether backward frees each block."""
    found: Flags = case.attribution.phases.codes_of(case.replayed.freed_by[blocks]) == phase_code(Phase.BACKWARD)
    return found
