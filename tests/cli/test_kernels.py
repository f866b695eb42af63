import dataclasses
import io
import json
import sys
import types
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.kernels.registry import BUILT_IN, build_registry
from ligerprof.kernels.selection import KERNEL_NAMES, SLOTS, inapplicable_reason
from ligerprof.kernels.spec import KernelSpec
from ligerprof.models import load_model
from ligerprof.reports.kernels import kernels_json, list_states, render_kernels
from ligerprof.reports.terminal import PLAIN_WIDTH, console


@pytest.fixture
def plugin_kernel(monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
    """A kernel of a plug-in, importable as `plugin_module:SPEC`."""
    spec = dataclasses.replace(
        BUILT_IN[0],
        provider="plugin[bold]",
        title="of the plug-in",
        unavailable_reason=lambda kind: f"needs a quantum computer, not {kind}",
    )
    module = types.ModuleType("plugin_module")
    module.SPEC = spec  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plugin_module", module)
    return spec


def plugin(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group="ligerprof.kernels")


def test_a_plugin_is_listed_under_its_own_name_with_its_reasons(plugin_kernel: KernelSpec) -> None:
    listing = list_states(build_registry([plugin("theirs", "plugin_module:SPEC")]), None)
    buffer = io.StringIO()
    console(buffer).print(render_kernels(listing))
    text = buffer.getvalue()
    # rich markup in a name is printed verbatim
    assert "plugin[bold]" in text
    assert text.count("needs a quantum computer, not simulated") == 1
    assert max(map(len, text.splitlines())) <= PLAIN_WIDTH


def test_a_broken_plugin_is_listed_with_its_reason() -> None:
    listing = list_states(build_registry([plugin("gone", "no_such_module:SPEC")]), None)
    buffer = io.StringIO()
    console(buffer).print(render_kernels(listing))
    assert "Broken plug-in gone = no_such_module:SPEC: ModuleNotFoundError" in buffer.getvalue()
    (broken,) = kernels_json(listing)["broken_plugins"]
    assert broken["entry_point"] == "gone = no_such_module:SPEC"
    assert len(kernels_json(listing)["kernels"]) == len(BUILT_IN)


@pytest.mark.parametrize("name", ["llama3.2-1b", "gemma2-2b", "gpt2-xl"])
def test_with_a_model_the_listing_shows_which_kernels_apply(name: str) -> None:
    result = CliRunner().invoke(main, ["kernels", "--model", name, "--json"])
    assert result.exit_code == 0
    listing = json.loads(result.stdout)
    assert listing["model"] == name
    assert {kernel["slot"] for kernel in listing["kernels"]} == set(KERNEL_NAMES)
    for kernel in listing["kernels"]:
        reason = inapplicable_reason(kernel["slot"], load_model(name))
        if reason is None and kernel["provider"] == "liger":
            # it patches fewer models
            continue
        assert (kernel["applies"], kernel["inapplicable_reason"]) == (reason is None, reason)
    table = CliRunner().invoke(main, ["kernels", "--model", name]).stdout
    assert f"applies to {name}" in table


def test_without_a_model_applies_is_null() -> None:
    listing = json.loads(CliRunner().invoke(main, ["kernels", "--json"]).stdout)
    assert listing["model"] is None
    assert {kernel["applies"] for kernel in listing["kernels"]} == {None}


def test_every_kernel_runs_simulated_and_every_reason_is_one_line() -> None:
    listing = json.loads(CliRunner().invoke(main, ["kernels", "--json"]).stdout)
    own = [kernel for kernel in listing["kernels"] if kernel["provider"] == "ligerprof"]
    assert [kernel["name"] for kernel in own if kernel["name"] == kernel["slot"]] == list(KERNEL_NAMES)
    variants = {variant: slot.name for slot in SLOTS.values() for variant in slot.fused_variants}
    assert {kernel["name"]: kernel["slot"] for kernel in own if kernel["name"] != kernel["slot"]} == variants
    assert all(kernel["unavailable_reasons"]["simulated"] is None for kernel in own)
    reasons = [reason for kernel in listing["kernels"] for reason in kernel["unavailable_reasons"].values()]
    assert all(reason is None or "\n" not in reason for reason in reasons)


def test_an_unknown_model_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["kernels", "--model", "llama9"])
    assert (result.exit_code, result.stdout) == (2, "")
