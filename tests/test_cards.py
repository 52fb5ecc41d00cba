"""The table of cards: names as people write them, and figures that cannot be each other's."""

import pytest
from remat.profiler.cards import CARDS, CardError, card


@pytest.mark.parametrize("name", ["h100-80gb", "H100-80GB", " h100_80gb ", "h100 80gb", "h100"])
def test_a_card_is_found_by_any_spelling_of_its_name(name):
    assert card(name) is CARDS["h100-80gb"]


def test_an_unknown_card_is_refused_with_the_nearest_name_and_all_there_are():
    with pytest.raises(CardError, match=r"unknown card 'h100-80': did you mean 'h100-80gb.*v100-32gb"):
        card("h100-80")
    with pytest.raises(
        CardError, match=r"unknown card 'cuda:0': for the device that is here leave device= \(--card\) out"
    ):
        card("cuda:0")


@pytest.mark.parametrize("name", CARDS)
def test_a_cards_figures_are_of_the_order_its_name_says(name):
    found = CARDS[name]
    gigabytes = int(next(part for part in name.split("-") if part.endswith("gb"))[:-2])
    assert 0.9 * gigabytes * 10**9 < found.memory_bytes <= gigabytes * 2**30
    assert found.rate("float16") > found.rate("float32")
    assert found.rate("float32", tf32=True) >= found.rate("float32")
    assert ("bfloat16" in found.rates) == (found.capability >= (8, 0))
    # So many operations a byte separate what computes from what waits for memory, on every card since Volta.
    assert 50 < found.rate("float16") / found.bandwidth < 500
    assert found.source


def test_a_type_without_instructions_of_its_own_runs_as_float32():
    assert card("v100").rate("bfloat16") == card("v100").rate("float32")
