"""Objects become JSON by their fields, in order, with categories as words."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from ligerprof.recipe.categories import Precision
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.serialization import document, select, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    size_bytes: int
    precision: Precision | None = None

    @property
    def doubled(self) -> int:
        return 2 * self.size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    phases: dict[Phase, int]
    parts: tuple[Inner, ...]
    path: Path
    roles: MemoryBreakdown


OUTER = Outer(
    phases={Phase.FORWARD: 1},
    parts=(Inner(size_bytes=3, precision=Precision.AMP), Inner(size_bytes=4)),
    path=Path("runs/001"),
    roles=MemoryBreakdown(roles={Role.LOGITS: 5}),
)


def test_a_dataclass_is_an_object_of_its_fields() -> None:
    found = to_json(OUTER)
    assert found == {
        "phases": {"forward": 1},
        "parts": [{"size_bytes": 3, "precision": "amp"}, {"size_bytes": 4, "precision": None}],
        "path": "runs/001",
        "roles": OUTER.roles.to_json(),
    }
    assert json.loads(json.dumps(found)) == found


def test_selected_attributes_keep_their_order_and_may_be_renamed_or_nested() -> None:
    found = select(OUTER, "roles.total_bytes", "where=path", "phases")
    assert list(found.items()) == [("total_bytes", 5), ("where", "runs/001"), ("phases", {"forward": 1})]
    assert select(OUTER.parts[0], "bytes=size_bytes", "doubled") == {"bytes": 3, "doubled": 6}


def test_a_document_begins_with_schema_and_kind() -> None:
    assert list(document("peak", {"a": 1}, {"b": 2}).items()) == [("schema", 1), ("kind", "peak"), ("a", 1), ("b", 2)]


def test_a_value_without_a_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON form for complex"):
        to_json({"a": [1j]})
