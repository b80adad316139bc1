"""Which validation is the best."""

from triptych.training.objectives import LEAST_BLEU, Score, judge


def figures(loss: float, bleu: float, low: float) -> dict[str, float]:
    return {"valid_loss": loss, "valid_bleu": bleu, "valid_bleu_low": low}


def test_the_lower_loss_wins_while_bleu_is_noise() -> None:
    lucky, learnt = judge(figures(5.0, 0.0032, 0.0), "bleu"), judge(figures(4.1, 0.0011, 0.0), "bleu")
    assert learnt == Score("loss", -4.1)
    assert learnt.better_than(lucky)
    assert not lucky.better_than(learnt)


def test_a_few_lucky_sentences_are_noise_however_high_their_bleu() -> None:
    assert judge(figures(5.0, 30.0, LEAST_BLEU - 0.1), "bleu").by == "loss"


def test_bleu_decides_alone_once_it_means_something() -> None:
    first, later = judge(figures(2.0, 9.0, 8.0), "bleu"), judge(figures(2.5, 11.0, 10.0), "bleu")
    assert first.better_than(judge(figures(1.0, 5.5, 4.9), "bleu"))
    assert later.better_than(first)
    assert later == Score("bleu", 11.0)


def test_chrf_decides_where_it_is_asked_for_once_bleu_is_no_noise() -> None:
    early = judge({**figures(2.0, 3.0, 2.0), "valid_chrf": 40.0}, "chrf")
    later = judge({**figures(2.5, 9.0, 8.0), "valid_chrf": 30.0}, "chrf")
    assert (early, later) == (Score("loss", -2.0), Score("chrf", 30.0))
    assert later.better_than(early)


def test_a_validation_is_not_better_than_its_equal() -> None:
    for low in (0.0, 8.0):
        judged = judge(figures(2.0, 9.0, low), "bleu")
        assert not judged.better_than(judged)


def test_by_loss_bleu_is_never_looked_at() -> None:
    assert judge(figures(2.0, 40.0, 38.0), "loss") == judge({"valid_loss": 2.0}, "loss")
