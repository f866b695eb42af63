"""Read the stack of an allocation: its Python calls, the autograd node that ran, and the phase of training."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.models.architectures import layer_index
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.stamp import Stamp
from ligerprof.snapshots.trace import Flags, Int64s, number_pairs
from ligerprof.text import printable

# torch writes an unknown line, -1, as an unsigned 64-bit integer
_LINE_LIMIT = 2**31
_LONGEST_NAME = 1000
_NATIVE_FILE = re.compile(r"\?\?|.*\.(?:cpp|cc|c|cu|cuh|h|hpp)|")
_NODE = re.compile(r"torch::autograd::(?:generated::)?(\w+)::apply\(")
_RELEASE = re.compile(r"torch::autograd::(?:generated::)?(\w+)::release_variables\(")
# C++ frames of one call end where the interpreter or autograd's engine called it
_CALLER = re.compile(r"_PyEval_EvalFrameDefault|torch::autograd::Node::operator\(\)")
_OPERATOR = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)\(")
_OVERLOAD = re.compile(r"_(?:dim_IntList|dim|dtype_layout|memory_format|dtype|device|layout|int|out|nd|low|[A-Z]\w*)$")
_CAST_ARGUMENT = re.compile(r"at::autocast::\w*cast\(")
_CREATES = re.compile(r"(?:new_)?(?:empty|zeros|ones|full)(?:_like|_strided)?$|resize_$")
_OPERATOR_PREFIX = "at::_ops::"
# stacks of the thread that runs the training script end in one of these functions; those of autograd's threads do not
_MAIN_ROOTS = frozenset({"<module>", "_bootstrap", "_run_module_as_main", "_run_code", "run_module"})
# paths of installed packages start with the package, those of checkouts with the folder they were cloned into
_INSTALLED = re.compile(r"^(?:.*/)?(?:site|dist)-packages/")
_TORCH = r"^(?:.*/pytorch/)?torch/"
# functions that a recorder puts around those of the program
_RECORDER = re.compile(r"ligerprof/runs/recording/\w+\.py$")
_LIBRARY = re.compile(
    _TORCH + r"|^(?:.*/DeepSpeed/)?deepspeed/|^(?:.*/src/)?(?:accelerate|peft)/|liger_kernel/ops/|ligerprof/runs/"
)
# calls that only forward to others
_PLUMBING = re.compile(
    _TORCH + r"(?!optim/|utils/checkpoint|distributed|autograd)|deepspeed/utils/|/contextlib\.py|transformers/utils/"
    r"|ligerprof/kernels/\w+\.py|ligerprof/runs/simulated/"
)
# functions of FSDP that allocate whatever their callers need
_ALLOCATORS = frozenset({"allocate", "alloc_storage", "_alloc_storage", "alloc_all_gather_outputs"})
# frames that only wrap torch's operators
WRAPPERS = re.compile(_TORCH + r"(?:_ops|_jit_internal|_compile|utils/_device|utils/_contextlib|overrides)\.py$")
_MODULE_CALL = re.compile(_TORCH + r"nn/modules/(?:module|container)\.py$")
# modules that call an operator without a Python function in between
_DIRECT_CALL = re.compile(_TORCH + r"nn/modules/(?:(linear)\.py:forward|(conv)\.py:_conv_forward)$")
_FUNCTIONAL = re.compile(_TORCH + r"(?:nn/functional|_tensor|functional)\.py$")
_GENERIC_NAMES = frozenset({"forward", "backward", "inner", "wrapper", "__call__", "__init__"})
_DISPATCHERS = frozenset({"__torch_dispatch__", "__torch_function__"})
_COMMON_NAMES = frozenset({"__init__.py", "triton.py", "reference.py", "ops.py", "utils.py", "layer.py", "main.py"})
_OPTIMIZER_FILE = re.compile(
    r"/optim/|/optim_|optimizer|galore|deepspeed/(?:ops|runtime)/|/clip_grad\.py|/grad_scaler\.py"
)
_OPTIMIZER_CALLS = frozenset({"step", "clip_grad_norm_", "clip_grad_value_", "unscale_", "update", "_init_group"})
# torch wraps the step of each optimizer, also of those that a program defines itself
_STEP_WRAPPER = re.compile(_TORCH + r"optim/optimizer\.py")
# generated code is called through functions named `forward` too
_COMPILER = re.compile(_TORCH + r"_(?:functorch|dynamo|inductor)/")
_INDUCTOR = re.compile(_TORCH + r"_inductor/")
_PARTITION = re.compile(r"partition_\d+")
_ENGINE_CALL = "_engine_run_backward"
_BACKWARD_CALLS = frozenset({"backward", "unpack_hook", "recompute_fn", "_make_grads", _ENGINE_CALL})
_BUILD_CALLS = re.compile(
    r"__init__|from_pretrained|load_state_dict|_load_\w*(?:model|state|weight|param|checkpoint|pretrained|shard)\w*"
    r"|set_model_state_dict|empty_init|fully_shard|fsdp2_load_full_state_dict|fsdp2_prepare_model"
    r"|_move_states_to_device|parallelize_module|distribute_module"
)
# names that programs use for other things too
_LIBRARY_BUILD_CALLS = frozenset({"_apply", "convert", "initialize"})
_MODULE_CALLS = frozenset({"_call_impl", "_wrapped_call_impl", "inner"})
_RECOMPUTE = re.compile(f"{frames.CHECKPOINT}:(?:unpack_hook|recompute_fn|backward)$", re.MULTILINE)


class PythonCall(NamedTuple):
    """One Python frame; its line is 0 if unknown."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Stack:
    """The stack of an allocation.

    Attributes:
        calls: Python calls, innermost first.
        native: names of C++ functions, innermost first.
    """

    calls: tuple[PythonCall, ...]
    native: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        """The Python calls as lines of `file:function`, innermost first; rules match this text."""
        return "\n".join(f"{call.file}:{call.function}" for call in self.calls)

    @cached_property
    def native_text(self) -> str:
        """The C++ functions, one per line; rules match this text."""
        return "\n".join(self.native)

    @cached_property
    def node(self) -> str:
        """The autograd node that ran, such as `MmBackward0`, or ""."""
        match = _NODE.search(self.native_text)
        return match.group(1) if match else ""

    @cached_property
    def operators(self) -> frozenset[str]:
        """Names of torch's operators that ran, such as `log_softmax_int`."""
        names = (name[len(_OPERATOR_PREFIX) :] for name in self.native if name.startswith(_OPERATOR_PREFIX))
        return frozenset(name.partition("::")[0] for name in names)

    @cached_property
    def releasing_node(self) -> str:
        """The autograd node that dropped its saved tensors, or ""; of the stack of a free."""
        match = _RELEASE.search(self.native_text)
        return match.group(1) if match else ""

    @property
    def releases_packed(self) -> bool:
        """Whether the node dropped what a hook had packed in place of a saved tensor; of the stack of a free."""
        return "torch::autograd::PySavedVariableHooks" in self.native_text

    @property
    def deallocates(self) -> bool:
        """Whether a tensor object was deallocated; assumed without C++ functions. Of the stack of a free."""
        # those that the innermost Python call or autograd node ran
        of_call = takewhile(lambda name: not _CALLER.search(name), self.native)
        return not self.native or any("THPVariable_" in name for name in of_call)

    @property
    def on_main_thread(self) -> bool:
        """Whether the training script itself ran, outside backward."""
        return bool(self.calls) and self.calls[-1].function in _MAIN_ROOTS and self.phase is not Phase.BACKWARD

    @property
    def innermost(self) -> str:
        """`file:line function` of the innermost call, or of a module's caller; or ""."""
        return next((_describe(call) for call in self.calls if not _MODULE_CALL.search(call.file)), "")

    @cached_property
    def operation(self) -> str:
        """The torch operator that the innermost Python call or autograd node ran, else the Python function, or "".

        An allocation inside autocast's cast of an argument belongs to the cast, one in Python code that an
        operator calls (`__torch_dispatch__`) to the operator.
        """
        operator = ""
        for name in self.native:
            if operator and (_CALLER.search(name) or _CAST_ARGUMENT.search(name)):
                break
            match = _OPERATOR.search(name)
            operator = _OVERLOAD.sub("", match.group(1)) if match else operator
        function = self._function
        return function if function and (not operator or _CREATES.match(operator)) else operator

    @cached_property
    def _function(self) -> str:
        """The innermost Python call, if its name says what it computes."""
        call = next((call for call in self.calls if not WRAPPERS.search(call.file)), None)
        if call is None or call.function.startswith("<"):
            return ""
        if _FUNCTIONAL.search(call.file):
            return call.function.strip("_")
        match = _DIRECT_CALL.search(f"{call.file}:{call.function}")
        if match:
            return match.group(1) or match.group(2)
        return "" if call.function in _GENERIC_NAMES or re.search(_TORCH, call.file) else call.function

    @property
    def lines(self) -> tuple[str, ...]:
        """The whole stack, C++ functions first, then `file:line function` of the Python calls, innermost first."""
        return (*self.native, *(f"{call.file}:{call.line} {call.function}" for call in self.calls))

    @cached_property
    def model_calls(self) -> tuple[PythonCall, ...]:
        """Calls of the model's own forward methods, outermost first."""
        return tuple(call for call in reversed(self.calls) if _is_model_forward(call))

    @cached_property
    def build_calls(self) -> tuple[PythonCall, ...]:
        """Calls of the model's own constructors, outermost first."""
        return tuple(
            call for call in self.calls[::-1] if call.function == "__init__" and not _LIBRARY.search(call.file)
        )

    @cached_property
    def below_model(self) -> tuple[PythonCall, ...]:
        """The calls inside the model's innermost forward method."""
        return tuple(takewhile(lambda call: not _is_model_forward(call), self.calls))

    @cached_property
    def inner_text(self) -> str:
        """The part of `text` below the innermost call of a module: code of a hook or operator, not of its callers."""
        return "\n".join(f"{call.file}:{call.function}" for call in takewhile(_is_not_module_call, self.calls))

    @cached_property
    def in_linear(self) -> bool:
        """Whether the model's innermost forward method called a linear layer."""
        return any(call.file.endswith("nn/modules/linear.py") for call in self.below_model)

    @cached_property
    def is_generated(self) -> bool:
        """Whether code that inductor generated allocated, rather than inductor itself to measure kernels.

        The functions are named `call`, and `partition_0` and so on where CUDA graphs record parts of them. Between them
        and inductor's own calls, torch inserts the lines of the program that the generated line computes.
        """
        generated = list(takewhile(lambda call: not _INDUCTOR.search(call.file), self.calls))
        return len(generated) < len(self.calls) and any(map(_is_generated, generated))

    @cached_property
    def script_calls(self) -> tuple[PythonCall, ...]:
        """The calls of the script itself, outermost first, up to its first call of a library or of a model."""
        own = takewhile(lambda call: not (_LIBRARY.search(call.file) or _is_model_forward(call)), self.calls[::-1])
        return tuple(own)

    @property
    def script_line(self) -> str:
        """`file:line function` of the script's innermost call, or ""."""
        return _describe(self.script_calls[-1]) if self.script_calls else ""

    @property
    def in_head(self) -> bool:
        """Whether the outermost forward method called a linear layer itself: the language-model head."""
        return len(self.model_calls) == 1 and self.in_linear

    @cached_property
    def recomputes(self) -> bool:
        """Whether backward was recomputing a checkpointed forward pass.

        Reentrant checkpointing then runs backward within backward: its nodes compute no forward pass.
        """
        in_inner_backward = bool(self.node and self.calls) and self.calls[0].function == _ENGINE_CALL
        return not in_inner_backward and _RECOMPUTE.search(self.text) is not None

    @cached_property
    def description(self) -> str:
        """`file:line function` of the most informative call, else the autograd node, else ""."""
        own = (call for call in self.calls if not _forwards(call))
        call = next((call for call in own if not (self.is_generated and _is_generated(call))), None)
        in_autograd = bool(self.node) and self.calls[-1:] and self.calls[-1].function not in _MAIN_ROOTS
        if call is None or (in_autograd and not self.recomputes):
            return self.node or (_describe(self.calls[0]) if self.calls else "")
        return _describe(call)

    @cached_property
    def phase(self) -> Phase | None:
        """The phase of training, None if the stack does not show it."""
        if not self.calls:
            return Phase.BACKWARD if "torch::autograd::Engine" in self.native_text else None
        in_model = False
        for call in self.calls:
            if call.function in _BACKWARD_CALLS:
                return Phase.BACKWARD
            # the step may call a closure that runs the model
            if not in_model and _is_optimizer(call):
                return Phase.OPTIMIZER
            in_model = in_model or (call.function.endswith("forward") and not _COMPILER.search(call.file))
        if self.calls[-1].function not in _MAIN_ROOTS:
            return Phase.BACKWARD
        names = {call.function for call in self.calls}
        if any(name.endswith("forward") for name in names) or "torch/nn/functional.py" in self.text:
            return Phase.FORWARD
        builds = any(_BUILD_CALLS.fullmatch(name) for name in names) or any(
            call.function in _LIBRARY_BUILD_CALLS and _LIBRARY.search(call.file) for call in self.calls
        )
        return Phase.BUILD if builds else Phase.OUTSIDE


class StackReader:
    """Turns lists of frames into stacks; reads each frame and each list once, even if many events share it."""

    def __init__(self) -> None:
        self._frames: dict[int, PythonCall | str | None] = {}
        self._stacks: dict[tuple[int, ...], Stack] = {}

    def read(self, frames: Any) -> Stack:
        """The stack of a list of frames; entries that are not frames, or lack names, are left out.

        Args:
            frames: as in the snapshot, unchecked; must outlive the reader, which identifies frames by `id`.
        """
        listed = frames if isinstance(frames, list) else ()
        identities = tuple(map(id, listed))
        if identities not in self._stacks:
            self._stacks[identities] = self._read(listed)
        return self._stacks[identities]

    def known(self, frames: Any) -> Stack | None:
        """The stack of a list of frames if it was read before; arguments as in `read`."""
        return self._stacks.get(tuple(map(id, frames if isinstance(frames, list) else ())))

    def _read(self, frames: Sequence[Any]) -> Stack:
        known = self._frames
        for frame in frames:
            if id(frame) not in known:
                known[id(frame)] = _read_frame(frame)
        read = [known[id(frame)] for frame in frames]
        return Stack(
            calls=tuple([one for one in read if type(one) is PythonCall]),
            native=tuple([one for one in read if type(one) is str]),
        )


def _is_generated(call: PythonCall) -> bool:
    return call.function == "call" or _PARTITION.fullmatch(call.function) is not None


def _read_frame(frame: Any) -> PythonCall | str | None:
    if not isinstance(frame, dict):
        return None
    file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
    if not isinstance(file, str) or not isinstance(name, str):
        return None
    if _NATIVE_FILE.fullmatch(file):
        return printable(name)
    # no program has such names, and every rule searches them
    file, name = printable(file[-_LONGEST_NAME:]), printable(name[:_LONGEST_NAME])
    if _RECORDER.search(file):
        return None
    known_line = line if isinstance(line, int) and 0 < line < _LINE_LIMIT else 0
    return PythonCall(_INSTALLED.sub("", file), known_line, name)


def _is_optimizer(call: PythonCall) -> bool:
    if call.function in _OPTIMIZER_CALLS:
        return _OPTIMIZER_FILE.search(call.file) is not None
    return call.function == "wrapper" and _STEP_WRAPPER.search(call.file) is not None


def _is_model_forward(call: PythonCall) -> bool:
    return call.function.endswith("forward") and not _LIBRARY.search(call.file)


def _is_not_module_call(call: PythonCall) -> bool:
    return not (call.function in _MODULE_CALLS and call.file.endswith("nn/modules/module.py"))


def _forwards(call: PythonCall) -> bool:
    allocates = call.function in _ALLOCATORS and "torch/distributed/" in call.file
    return allocates or call.function in _DISPATCHERS or _PLUMBING.search(call.file) is not None


def _describe(call: PythonCall) -> str:
    folder, _, file = call.file.rpartition("/")
    # kernels share file names, so the folder is needed too
    place = f"{folder.rpartition('/')[2]}/{file}" if file in _COMMON_NAMES else file
    return f"{place}:{call.line} {call.function}" if call.line else f"{place} {call.function}"


# a program of thousands of modules has about as many; each takes time
_MOST_SITES = 30_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSite:
    """The place in the program that allocated some blocks: its stack, and the recorder's stamp if there is one."""

    stack: Stack
    stamp: Stamp | None

    @property
    def module(self) -> str:
        """Dotted module name, "" if unknown."""
        return self.stamp.module if self.stamp else ""

    @property
    def node(self) -> str:
        """The autograd node that ran, or ""."""
        return self.stamp.node if self.stamp and self.stamp.node else self.stack.node

    @property
    def place(self) -> tuple[object, ...]:
        """What is equal for the same place in any step; stamps name nodes in some steps alone."""
        return self.stack.calls, self.stack.node or self.node, self.module, self.recomputes

    @property
    def recomputes(self) -> bool:
        """Whether backward was recomputing a checkpointed forward pass."""
        return self.stamp.recompute if self.stamp else self.stack.recomputes

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer in the module's name."""
        return layer_index(self.module)

    @property
    def description(self) -> str:
        """The most informative call or autograd node, or ""."""
        return self.stack.description or self.node

    @property
    def operation(self) -> str:
        """The torch operator, Python function or autograd node that allocated, or ""."""
        return self.stack.operation or self.node

    @property
    def is_known(self) -> bool:
        """Whether the recording has a stamp or a stack for this call site."""
        return self.stamp is not None or bool(self.stack.calls or self.stack.node)

    @property
    def has_calls(self) -> bool:
        """Whether the recording has a call, a module or an autograd node; without, at most a phase and a step."""
        return bool(self.stack.calls or self.stack.native or self.module or self.node)


class CallSites:
    """The call site of each of a device's blocks, and the calls that allocated consecutive blocks.

    Attributes:
        sites: the distinct call sites, each with its first stamp less the step.
        is_cut: whether there are more call sites than any program has; blocks of the others share one without a stack.
        site_of: index into `sites` of each block.
        index_in_call: number of blocks that the same call had allocated before each block.
        blocks_in_call: number of blocks that the call allocated in all.
        next_call: index of the next call's first allocation event; past the end for the last call.
    """

    def __init__(self, replayed: Replay) -> None:
        self.sites: list[CallSite] = []
        self.is_cut = False
        self._requested_bytes = replayed.requested_bytes
        self.site_of = self._find_sites(replayed)
        self._site_by_block: list[int] = self.site_of.tolist()
        self.index_in_call, self.blocks_in_call, self.next_call = self._group_calls(replayed)

    @cached_property
    def place_of(self) -> Int64s:
        """A number for each block, ascending without gaps from 0; equal for the same place in any step."""
        numbers: dict[object, int] = {}
        of_site = [numbers.setdefault(site.place, len(numbers)) for site in self.sites]
        return np.array(of_site, dtype=np.int64)[self.site_of]

    @cached_property
    def surroundings(self) -> Int64s:
        """A number for each block: its place, its index in the call, and the place of the block before the call.

        Lines with several calls, such as `down(act(gate(x)) * up(x))`, are one place with several surroundings.
        """
        before = np.arange(len(self.place_of)) - self.index_in_call - 1
        places = np.append(self.place_of, -1)
        return number_pairs(number_pairs(self.place_of, places[before] + 1), self.index_in_call)

    @cached_property
    def sizes(self) -> tuple[Int64s, Int64s]:
        """The distinct numbers of requested bytes, ascending, and the index of each block's among them."""
        return np.unique(self._requested_bytes, return_inverse=True)

    @cached_property
    def size_at_place(self) -> Int64s:
        """A number for each block; equal for the same place and size in any step."""
        return number_pairs(self.place_of, self.sizes[1])

    def of(self, block: int) -> CallSite:
        """The call site of one block."""
        return self.sites[self._site_by_block[block]]

    def at(self, chosen: Callable[[CallSite], bool]) -> Flags:
        """Whether each block was allocated at a chosen site."""
        of_sites: Flags = np.array([chosen(site) for site in self.sites], dtype=bool)
        return of_sites[self.site_of]

    def matching(self, pattern: re.Pattern[str]) -> Flags:
        """Whether a pattern occurs in the Python calls of each block."""
        return self._of_stacks(pattern, lambda stack: stack.text)

    def matching_inner(self, pattern: re.Pattern[str]) -> Flags:
        """Whether a pattern occurs in the Python calls of each block below the innermost call of a module."""
        return self._of_stacks(pattern, lambda stack: stack.inner_text)

    def _of_stacks(self, pattern: re.Pattern[str], text_of: Callable[[Stack], str]) -> Flags:
        stacks, stack_of = self._stacks
        search = pattern.search
        matches: Flags = np.array([search(text_of(stack)) is not None for stack in stacks], dtype=bool)
        return matches[stack_of]

    @cached_property
    def _stacks(self) -> tuple[tuple[Stack, ...], Int64s]:
        """The distinct stacks, which sites with different stamps share, and the index of each block's among them."""
        numbers: dict[int, int] = {}
        of_site = [numbers.setdefault(id(site.stack), len(numbers)) for site in self.sites]
        stacks = {id(site.stack): site.stack for site in self.sites}
        return tuple(stacks.values()), np.array(of_site, dtype=np.int64)[self.site_of]

    def _find_sites(self, replayed: Replay) -> Int64s:
        """The site of each block; thousands of events share stacks and stamps, which are compared by `id` first."""
        older = [block.frames for block in replayed.older_blocks]
        allocated = replayed.allocated_by[len(older) :]
        frame_codes, frames = replayed.trace.objects("frames")
        text_codes, texts = replayed.trace.objects("user_metadata")
        frame_of = np.append(np.arange(len(older)) + len(frames), frame_codes[allocated])
        text_of = np.append(np.full(len(older), len(texts)), text_codes[allocated])
        frames, texts = [*frames, *older], [*texts, None]
        pairs = frame_of * len(texts) + text_of
        _, first, site_of_pair = np.unique(pairs, return_index=True, return_inverse=True)
        reader, unknown = StackReader(), Stack(calls=(), native=())
        known: dict[tuple[int, Stamp | None], int] = {}
        sites = np.zeros(len(first), dtype=np.int64)
        for pair in np.argsort(first).tolist():
            # frames and stacks outlive this loop, so that each id stays unique
            listed, text = frames[frame_of[first[pair]]], texts[text_of[first[pair]]]
            is_full = len(known) >= _MOST_SITES
            stack = reader.known(listed) if is_full else reader.read(listed)
            stamp = Stamp.parse(text)
            # the same call in another step
            key = (id(stack), replace(stamp, step=0) if stamp else None)
            if key not in known and is_full:
                self.is_cut = True
                stack, key = unknown, (id(unknown), None)
            if key not in known:
                known[key] = len(self.sites)
                self.sites.append(CallSite(stack=stack or unknown, stamp=key[1]))
            sites[pair] = known[key]
        return sites[site_of_pair]

    def _group_calls(self, replayed: Replay) -> tuple[Int64s, Int64s, Int64s]:
        """Group consecutive blocks that have the same stack, node and stamp into calls."""
        numbers: dict[object, int] = {}
        keys = ((site.stack.calls, site.stack.node, site.stamp) for site in self.sites)
        calls = [numbers.setdefault(key, len(numbers)) for key in keys]
        if not calls:
            return self.site_of, self.site_of, self.site_of
        call_of = np.array(calls, dtype=np.int64)[self.site_of]
        starts = np.flatnonzero(np.append(True, np.diff(call_of)))
        ends = np.append(starts[1:], len(call_of))
        lengths = ends - starts
        allocated = np.append(replayed.allocated_by, len(replayed.trace))
        index_in_call = np.arange(len(call_of)) - np.repeat(starts, lengths)
        return index_in_call, np.repeat(lengths, lengths), np.repeat(allocated[ends], lengths)
