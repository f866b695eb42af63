"""The registry: what is built in, what plug-ins add, and what a broken one does."""

import dataclasses
import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import KernelUnavailableError
from ligerprof.kernels import KERNEL_NAMES, KernelSpec, find_kernel, list_kernels
from ligerprof.kernels.device import DEVICE_KINDS, triton_unavailable_reason
from ligerprof.kernels.linear_cross_entropy.spec import SPECS as FLCE_SPECS
from ligerprof.kernels.registry import BUILT_IN, ENTRY_POINT_GROUP, build_registry, find_kernel_set
from ligerprof.kernels.selection import SLOTS, applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, load_entry
from ligerprof.models import load_model
from tests.kernels.test_memory import LLAMA_1B
from tests.paths import DATA

PLUGIN = DATA / "plugin"

# what entry points may name
GOOD = dataclasses.replace(FLCE_SPECS[0], provider="plug-in")
WORDS = ("not", "a", "kernel")
WRONG_SLOT = dataclasses.replace(GOOD, slot="attention")
TWIN = FLCE_SPECS[0]
OWN_NAME = dataclasses.replace(GOOD, name="my_loss")
WRONG_PROVIDER = dataclasses.replace(GOOD, provider="a+b")
WRONG_ENTRY = dataclasses.replace(GOOD, entry="module.function")


def make_kernels() -> tuple[KernelSpec, ...]:
    return (GOOD, dataclasses.replace(GOOD, name="ce", slot="ce"))


def misspell() -> KernelSpec:
    return dataclasses.replace(GOOD, applies=applies("rmsnorm"))


def fail() -> KernelSpec:
    raise RuntimeError("no driver\nof that kind")


def leave() -> KernelSpec:
    sys.exit(3)


def interrupt() -> KernelSpec:
    raise KeyboardInterrupt


def print_and_make() -> KernelSpec:
    print("hello")
    return GOOD


def plugin(name: str) -> EntryPoint:
    return EntryPoint(name="plug-in", value=f"{__name__}:{name}", group=ENTRY_POINT_GROUP)


def test_every_slot_has_a_built_in_kernel_and_a_reference() -> None:
    for provider in ("ligerprof", "torch"):
        named = [kernel for kernel in BUILT_IN if kernel.provider == provider and kernel.name == kernel.slot]
        assert sorted(kernel.name for kernel in named) == sorted(KERNEL_NAMES)


def test_fused_variants_come_with_their_slots_if_the_provider_has_them() -> None:
    ours = {kernel.name: kernel.slot for kernel in BUILT_IN if kernel.provider == "ligerprof"}
    variants = {variant: slot.name for slot in SLOTS.values() for variant in slot.fused_variants}
    assert {name: slot for name, slot in ours.items() if name != slot} == variants
    model = load_model("llama3.2-1b")
    assert list(find_kernel_set({"rms": "ligerprof", "flce": "ligerprof"}, model)) == ["rms", "flce", "add_rms"]
    assert list(find_kernel_set({"rms": "torch", "swiglu": "torch"}, model)) == ["rms", "swiglu"]


@pytest.mark.parametrize("kernel", BUILT_IN, ids=lambda kernel: f"{kernel.provider}-{kernel.name}")
def test_entries_are_functions_that_import(kernel: KernelSpec) -> None:
    assert callable(load_entry(kernel.reference))
    if kernel.provider in ("ligerprof", "torch"):
        assert callable(load_entry(kernel.entry))


def test_kernels_come_in_the_order_of_the_option() -> None:
    slots = [kernel.slot for kernel in list_kernels()]
    assert slots == sorted(slots, key=KERNEL_NAMES.index)


@pytest.mark.parametrize(("name", "added"), [("GOOD", 1), ("make_kernels", 2)])
def test_a_plugin_is_a_kernel_or_a_callable_that_returns_some(name: str, added: int) -> None:
    registry = build_registry([plugin(name)])
    assert len(registry.kernels) == len(BUILT_IN) + added
    assert "plug-in" in registry.providers
    assert not registry.broken


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("WORDS", "provides str, not KernelSpec"),
        ("WRONG_SLOT", "fills the slot 'attention'"),
        ("OWN_NAME", "slot flce is named 'my_loss'; known: flce"),
        ("WRONG_PROVIDER", "provider 'a+b' must be a word"),
        ("WRONG_ENTRY", "'module.function'; write it as module:function"),
        ("fail", "RuntimeError: no driver of that kind"),
        ("misspell", "no slot 'rmsnorm'; known: rope, rms"),
        ("leave", "SystemExit: 3"),
        ("TWIN", "provider 'ligerprof' has two kernels named 'flce'"),
        ("missing", "AttributeError"),
    ],
)
def test_a_broken_plugin_is_listed_with_its_reason_and_the_others_load(name: str, reason: str) -> None:
    registry = build_registry([plugin(name), plugin("GOOD")])
    assert len(registry.kernels) == len(BUILT_IN) + 1
    assert [item.entry_point for item in registry.broken] == [f"plug-in = {__name__}:{name}"]
    assert reason in registry.broken[0].reason
    assert "\n" not in registry.broken[0].reason


def raise_boom(*_: object) -> Any:
    raise ValueError("boom")


def state_negative_bytes(_: KernelShape) -> KernelMemory:
    return KernelMemory(output_bytes=-1)


def state_half_bytes(_: KernelShape) -> KernelMemory:
    return KernelMemory(saved_bytes=0.5)  # type: ignore[arg-type]


def state_one_name(_: KernelShape) -> KernelMemory:
    return KernelMemory(kept_inputs="gate")  # type: ignore[arg-type]


def state_a_dict(_: KernelShape) -> Any:
    return {"output_bytes": 1}


FAILING = dataclasses.replace(GOOD, applies=raise_boom, unavailable_reason=raise_boom)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (raise_boom, "its memory raises ValueError: boom"),
        (state_negative_bytes, "ValueError: output_bytes is -1. It must not be negative"),
        (state_half_bytes, "TypeError: saved_bytes is 0.5. It must be an integer"),
        (state_one_name, "TypeError: kept_inputs is 'gate'. It must be a tuple"),
        (state_a_dict, "its memory is dict, not KernelMemory"),
    ],
)
def test_functions_of_a_plugin_fail_in_one_line(memory: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FAILING", dataclasses.replace(FAILING, memory=memory))
    registry = build_registry([plugin("FAILING")])
    (kernel,) = (kernel for kernel in registry.kernels if kernel.provider == "plug-in")
    monkeypatch.setattr("ligerprof.kernels.registry.load_registry", lambda: registry)
    assert kernel.memory is not None
    with pytest.raises(KernelUnavailableError, match=f"kernel flce of plug-in: .*{says}"):
        kernel.memory(LLAMA_1B)
    with pytest.raises(KernelUnavailableError, match=r"kernel flce of plug-in: ValueError: boom\. Leave flce out"):
        find_kernel_set({"flce": "plug-in"}, load_model("llama3.2-1b"))
    assert kernel.unavailable_reason("cpu") == "ValueError: boom"


def test_what_a_plugin_prints_is_not_output(capsys: pytest.CaptureFixture[str]) -> None:
    registry = build_registry([plugin("print_and_make")])
    assert len(registry.kernels) == len(BUILT_IN) + 1
    assert capsys.readouterr() == ("", "hello\n")


def test_ctrl_c_while_a_plugin_loads_ends_the_command() -> None:
    with pytest.raises(KeyboardInterrupt):
        build_registry([plugin("interrupt")])


def test_a_missing_kernel_lists_the_providers_that_have_it() -> None:
    with pytest.raises(
        KernelUnavailableError,
        match=r"provider 'unknown' has no kernel 'flce'\. Providers that have it: ligerprof, torch",
    ):
        find_kernel("flce", "unknown")


def test_the_interpreter_must_be_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in (triton_unavailable_reason("cpu") or "")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_unavailable_reason("cpu") is None
    assert triton_unavailable_reason("simulated") is None


@pytest.mark.parametrize("device_kind", DEVICE_KINDS)
def test_plain_torch_runs_everywhere(device_kind: str) -> None:
    assert find_kernel("flce", "torch").unavailable_reason(device_kind) is None


@pytest.mark.slow
def test_an_installed_plugin_is_found_and_its_kernel_runs(tmp_path: Path) -> None:
    """The example package, installed next to this environment, in a separate process."""
    pytest.importorskip("hatchling", reason="the example is built with hatchling")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(tmp_path), str(PLUGIN)], check=True, timeout=120)
    program = """
import json, sys, torch
from ligerprof.kernels import find_kernel
from ligerprof.kernels.spec import KernelMemory, KernelShape, load_entry
from ligerprof.kernels.selection import applies
from ligerprof.models import load_model
spec = find_kernel("swiglu", "example")
gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
right = torch.autograd.gradcheck(load_entry(spec.entry), (gate, up))
print(json.dumps({"title": spec.title, "right": right}))
"""
    path = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=path, check=True, capture_output=True, text=True, timeout=120
    )
    assert json.loads(done.stdout) == {"title": "SwiGLU that recomputes silu(gate), in plain torch", "right": True}
