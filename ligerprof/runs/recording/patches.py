"""Functions of torch and of other packages that are wrapped while a recording runs."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import _guards

from ligerprof.roles import Phase
from ligerprof.runs.recording.imports import after_import, forget

# functions that gather, convert or write weights and states; and what they call, for programs that import them by name
_SAVING = {
    "torch": ("save",),
    "torch.serialization": ("_save",),
    "torch.nn.modules.module": ("Module.state_dict",),
    "torch.optim.optimizer": ("Optimizer.state_dict",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "torch.distributed.checkpoint.state_dict_saver": ("_save_state_dict",),
    "torch.distributed.checkpoint.state_dict": (
        *("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"),
        *("_get_model_state_dict", "_get_optim_state_dict", "_maybe_full_or_cpu_state_dict"),
    ),
    "safetensors.torch": ("save_file", "save_model", "_flatten", "_flatten_as_ptr"),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "peft.peft_model": ("PeftModel.save_pretrained",),
    "accelerate.accelerator": ("Accelerator.save_state", "Accelerator.save_model", "Accelerator.get_state_dict"),
    "deepspeed.runtime.engine": ("DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.save_16bit_model"),
}
_DEEPSPEED = "deepspeed.runtime.engine"
# (module, function in it, phase); in a phase of its own, a function may enter others
PHASES = (
    *((module, name, Phase.SAVING) for module, names in _SAVING.items() for name in names),
    # both do more than autograd and the wrapped optimizer: reduction, unscaling, clipping, master weights
    (_DEEPSPEED, "DeepSpeedEngine.backward", Phase.BACKWARD),
    (_DEEPSPEED, "DeepSpeedEngine.step", Phase.OPTIMIZER),
)

GENERATE = ("transformers.generation.utils", "GenerationMixin.generate")

# functions of checkpointing that run without gradients in forward, and again with gradients in backward
REENTRANT = ("torch.utils.checkpoint", "deepspeed.runtime.activation_checkpointing.checkpointing")

# what torch.compile notes of the running thread
_OF_THREAD: Any = getattr(_guards, "_TLS", None)


class _Patch(NamedTuple):
    owner: Any
    name: str
    original: Any
    wrapper: Any
    inherited: bool


class Patches:
    """Wrappers around functions, removed together.

    A wrapper that another one wraps, or that a module has imported by name, stays in place and only passes on.
    """

    def __init__(self) -> None:
        self._patches: list[_Patch] = []
        self._waiting: list[tuple[str, Callable[[ModuleType], None]]] = []
        self.active = True

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by `make(original)`, which must only pass on once `active` is False."""
        original = getattr(owner, name)
        self.replace(owner, name, functools.wraps(original)(make(original)))

    def replace(self, owner: Any, name: str, wrapper: Any) -> None:
        """Replace an attribute by a function that calls the original."""
        self._patches.append(_Patch(owner, name, getattr(owner, name), wrapper, name not in vars(owner)))
        setattr(owner, name, wrapper)

    def around(self, module: str, path: str, context: Callable[[], AbstractContextManager[Any] | None]) -> None:
        """Run a function of a module inside a context, from the module's import on.

        Args:
            context: makes the context of a call, None for a call without one. Each module inside a model calls
                Module.state_dict, so that only the first of these calls should cost anything.
            path: name of the function, with its class: `Module.state_dict`. Versions of a package without it are
                left alone.
        """

        def make(original: Any) -> Any:
            def wrapper(*arguments: Any, **named: Any) -> Any:
                running = context() if self.active else None
                if running is None:
                    return original(*arguments, **named)
                with running:
                    return original(*arguments, **named)

            return wrapper

        self.wrap_imported(module, path, make)

    def wrap_imported(self, module: str, path: str, make: Callable[[Any], Any]) -> None:
        """As `wrap`, from a module's import on; the path is that of `around`."""

        def patch(imported: ModuleType) -> None:
            *classes, name = path.split(".")
            owner: Any = imported
            for inner in classes:
                owner = getattr(owner, inner, None)
            if self.active and hasattr(owner, name):
                self.wrap(owner, name, make)

        if module in sys.modules:
            patch(sys.modules[module])
        else:
            self._waiting.append((module, patch))
            after_import(module, patch)

    def undo(self) -> None:
        self.active = False
        for module, patch in self._waiting:
            forget(module, patch)
        for owner, name, original, wrapper, inherited in reversed(self._patches):
            if vars(owner).get(name) is not wrapper:
                continue
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._patches.clear()
        self._waiting.clear()


def is_outermost_gradient() -> bool:
    """Whether the outermost torch.func.grad runs: its gradients are results, although it creates their graph."""
    try:
        stack = torch._C._functorch.get_interpreter_stack() or ()
        return sum(each.key() == torch._C._functorch.TransformType.Grad for each in stack) == 1
    except AttributeError:
        # another version of torch
        return False


def is_traced() -> bool:
    """Whether torch.compile traces what this thread runs."""
    if _OF_THREAD is None:
        # another version of torch
        return _guards.TracingContext.try_get() is not None
    # as that function does, which takes 1 us where nothing is traced
    return _OF_THREAD.__dict__.get("tracing_context") is not None


def skip_when_compiling(*modules: str) -> None:
    """Keep torch.compile from compiling the functions of modules on their own, where they run between its graphs.

    What they call is compiled as it would be without them.
    """
    compiler: Any = torch._C._dynamo.eval_frame
    try:
        skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT)
        for module in modules:
            for code in _codes(vars(sys.modules[module]).values(), module):
                compiler.set_code_exec_strategy(code, skip)
    except AttributeError:
        # another version of torch; it compiles a few small functions of ours
        return


def _codes(values: Iterable[Any], module: str) -> Iterator[CodeType]:
    """The code of functions and classes that a module defines, and of the functions inside them."""
    for value in values:
        if isinstance(value, CodeType):
            yield value
            yield from _codes(value.co_consts, module)
        elif isinstance(value, FunctionType):
            yield from _codes([value.__code__], module)
        elif isinstance(value, type) and value.__module__ == module:
            yield from _codes(vars(value).values(), module)
