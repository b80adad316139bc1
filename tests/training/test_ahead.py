"""Making items ahead of their use, in a thread of their own."""

import threading
import time
from collections.abc import Iterator

import pytest

from interrupting import wait_until
from triptych.training.machine import ahead


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "triptych-ahead"]


def numbers(made: list[int], upto: int = 1000) -> Iterator[int]:
    for number in range(upto):
        made.append(number)
        yield number


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_all_items_come_in_their_order_and_no_thread_stays(depth: int) -> None:
    assert list(ahead(numbers([], 50), depth)) == list(range(50))
    assert list(ahead(iter(()), depth)) == []
    assert not threads()


def test_items_may_be_none_or_errors() -> None:
    items = [None, ValueError("an item, not raised"), (1, 2), None]
    assert list(ahead(items)) == items


@pytest.mark.parametrize("depth", [1, 3])
def test_items_are_made_while_one_is_used_but_no_more_than_the_depth(depth: int) -> None:
    made: list[int] = []
    items = ahead(numbers(made), depth)
    assert next(items) == 0
    wait_until(lambda: len(made) == 1 + depth)
    time.sleep(0.05)
    assert len(made) == 1 + depth
    assert next(items) == 1
    wait_until(lambda: len(made) == 2 + depth)
    items.close()


def test_items_are_made_in_one_other_thread() -> None:
    def where() -> Iterator[int]:
        for _ in range(10):
            yield threading.get_ident()

    places = set(ahead(where()))
    assert len(places) == 1
    assert threading.get_ident() not in places


def test_nothing_is_made_before_the_first_item_is_asked_for() -> None:
    made: list[int] = []
    items = ahead(numbers(made))
    assert not threads()
    items.close()
    assert made == []


def test_closing_stops_the_thread() -> None:
    made: list[int] = []
    items = ahead(numbers(made))
    next(items)
    assert len(threads()) == 1
    items.close()
    assert not threads()
    assert len(made) <= 3


def test_leaving_a_loop_stops_the_thread() -> None:
    for number in ahead(numbers([])):
        if number == 3:
            break
    assert not threads()


def test_an_error_comes_after_the_items_before_it_and_leaves_no_thread() -> None:
    def failing() -> Iterator[int]:
        yield 1
        yield 2
        raise ZeroDivisionError("the third")

    taken: list[int] = []
    with pytest.raises(ZeroDivisionError, match="the third"):
        taken.extend(ahead(failing()))
    assert not threads()
    items = ahead(failing())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ZeroDivisionError, match="the third"):
        next(items)


def test_an_error_that_nobody_asked_for_is_dropped_on_closing() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError

    items = ahead(failing())
    next(items)
    items.close()
    assert not threads()
