"""How tokens choose experts: files, words, and the tokens of each expert."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.errors import RecipeError
from ligerprof.models import spec_from_config
from ligerprof.recipe.routing import UNIFORM, WORST, canonical_routing, conflict, tokens_per_expert
from ligerprof.recipe.training import TrainingRecipe

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@given(
    chosen=st.integers(1, 4),
    tokens=st.integers(1, 3000),
    shares=st.lists(st.integers(0, 100), min_size=4, max_size=9),
    word=st.sampled_from([UNIFORM, WORST, None]),
)
def test_every_token_has_its_experts_and_no_expert_a_token_twice(
    chosen: int, tokens: int, shares: list[int], word: str | None
) -> None:
    routing = word or ",".join(map(str, shares))
    if conflict(routing, experts=len(shares), chosen=chosen, layers=1) is not None:
        assert word is None
        return
    counts = tokens_per_expert(routing, 0, tokens=tokens, experts=len(shares), chosen=chosen)
    pairs = tokens * chosen
    assert sum(counts) == pairs
    assert max(counts) <= tokens
    given_shares = shares if word is None else [1] * (len(shares) if word == UNIFORM else chosen)
    for count, share in zip(counts, given_shares, strict=False):
        assert abs(count - share * pairs / sum(given_shares)) < 1


def test_given_tokens_that_add_up_are_taken_as_they_are() -> None:
    rows = [(7, 0, 3, 6), (8, 8, 0, 0), (1, 2, 5, 8)]
    routing = canonical_routing(";".join(",".join(map(str, row)) for row in rows))
    for layer, row in enumerate(rows):
        assert tokens_per_expert(routing, layer, tokens=8, experts=4, chosen=2) == row


def test_a_stored_routing_may_be_longer_than_a_file_name() -> None:
    stored = ";".join([",".join(["16"] * 256)] * 61)
    assert canonical_routing(stored) == stored


def test_a_file_has_a_line_for_all_layers_or_one_each(tmp_path: Path) -> None:
    path = tmp_path / "routing.txt"
    path.write_text("# tokens of each expert\n7 0 3 6\n\n8,8,0, 0  # the second\n1\t2 5 8\n", encoding="utf-8")
    spec = spec_from_config(MIXTRAL, name="small")
    recipe = TrainingRecipe(model=spec, routing=str(path), experts="eager")
    assert recipe.routing == "7,0,3,6;8,8,0,0;1,2,5,8"
    assert TrainingRecipe.from_json(recipe.to_json()).routing == recipe.routing


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no number of tokens"),
        ("# nothing\n", "names no number of tokens"),
        ("1 2 x 4", "'x' is not a number of tokens"),
        ("1 -2 3 4", "'-2' is not a number of tokens"),
        ("1 2 3 ٣", "is not a number of tokens"),
        ("1 2 3 " + "9" * 5000, "is not a number of tokens"),
        ("\x1b[31m 2 3 4", "is not a number of tokens"),
        ("1 2 3", "line 1 has 3 numbers for 4 experts"),
        ("1 2 3 4\n1 2 3 4", "2 lines for 3 layers with experts"),
        ("0 0 0 0", "line 1 gives tokens to no expert"),
        ("9 1 1 1", "line 1 gives an expert more than every token once, with 2 experts per token"),
        ("1 2 3 4\n" * 200_000, "more than"),
    ],
)
def test_a_file_that_is_not_a_routing_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "routing.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        TrainingRecipe(model=spec_from_config(MIXTRAL, name="small"), routing=str(path))
    message = str(caught.value)
    assert says in message or "MiB" in message
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(message) < 400


def test_a_model_without_experts_has_no_routing() -> None:
    for options in ({"routing": "worst"}, {"routing": "1,2"}, {"experts": "eager"}):
        with pytest.raises(RecipeError, match=r"no experts\. Leave it out"):
            TrainingRecipe(model="tiny", **options)
    assert TrainingRecipe(model="tiny").routing == UNIFORM
