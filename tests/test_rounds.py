"""The beginning of a round of several models is recognised from their calls alone."""

from __future__ import annotations

from dynswap_ext._rounds import Rounds


def rounds_of(calls: str) -> str:
    """Return the calls, a letter each, with a bar before each that begins a round."""
    rounds = Rounds()
    return "".join("|" * rounds.call(model).begins_round + model for model in calls)


def test_a_pipeline() -> None:
    assert rounds_of("TXXXVTXXXVTXXXV") == "|TXXXV|TXXXV|TXXXV"


def test_a_decoder_of_several_calls() -> None:
    assert rounds_of("TXXXVVTXXXVVTXXXVV") == "|TXXXVV|TXXXVV|TXXXVV"


def test_text_encoders_that_alternate() -> None:
    """Two models that alternate are one round with those that follow, once these are known."""
    assert rounds_of("ABABXXVABABXXVABABXXV") == "|AB|ABXXV|ABABXXV|ABABXXV"


def test_one_of_two_alone() -> None:
    assert rounds_of("AAAA") == "|A|A|A|A"


def test_two_by_turns() -> None:
    assert rounds_of("ABABAB") == "|AB|AB|AB"


def test_a_model_that_does_not_come_again() -> None:
    assert rounds_of("T" + "XV" * 20).count("|") >= 8


def test_a_long_loop_is_one_of_its_own() -> None:
    assert rounds_of("T" + "X" * 100).count("|") == 1 + 36


def test_a_model_whose_fellow_has_gone() -> None:
    assert rounds_of("ABAB" + "B" * 8) == "|AB|ABBBB|B|B|B|B|B"


def test_calls_are_numbered_by_model_and_place() -> None:
    rounds = Rounds()
    numbers = [rounds.call(model).number for model in "TXXVTXXXV"]
    assert numbers == [1, 2, 3, 4, 1, 2, 3, 5, 4]
    assert [Rounds().call("T").is_new, rounds.call("T").is_new] == [True, False]
