"""Who samples what: every prompt once, in the order of the processes."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.engine.division import Division


@given(count=st.integers(0, 40), engines=st.integers(1, 6), members=st.integers(1, 3))
def test_every_prompt_is_kept_once_by_a_process_that_asks_for_it(count: int, engines: int, members: int) -> None:
    divisions = [Division(rank=rank, processes=engines * members, engines=engines) for rank in range(engines * members)]
    assert [place for one in divisions for place in one.kept(count)] == list(range(count))
    for one in divisions:
        assert set(one.kept(count)) <= set(one.asked(count))
        first = divisions[one.rank - one.rank % members]
        assert one.asked(count) == first.asked(count), "those that share an engine ask it for the same"
        assert len(one.asked(count)) <= -(-count // engines)
    assert [place for one in divisions[::members] for place in one.asked(count)] == list(range(count))


def test_the_main_process_asks_a_server_for_everything() -> None:
    first, second = (Division(rank=rank, processes=2, engines=1, main_only=True) for rank in range(2))
    assert (list(first.asked(3)), list(first.kept(3))) == ([0, 1, 2], [0, 1, 2])
    assert (list(second.asked(3)), list(second.kept(3))) == ([], [])
    assert (list(first.even(3)), list(second.even(3))) == ([0], [1, 2])
