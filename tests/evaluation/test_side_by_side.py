from dustin_trt.evaluation.side_by_side import describe_difference, first_difference, full_batch
from dustin_trt.runtime.stats import RunStats


def test_full_batch_steps_are_counted_alone():
    stats = RunStats()
    stats.add_step(3, 9, {"draft": 1.0}, {"verify": 2.0})
    stats.add_step(1, 1, {"draft": 1.0}, {"verify": 1.0})
    assert full_batch(stats).tokens_per_second == 3
    assert stats.total.tokens_per_second == 2


def test_the_first_difference_is_found():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 4]) == 1


def test_differences_are_told_briefly():
    assert describe_difference([None, None]) == "none"
    assert describe_difference([9, None, 7]) == "7 (2 of 3)"
