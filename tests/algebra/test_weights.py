"""Maps as they are applied."""

import pytest
import torch

from heads import make_layer
from triptych.core.algebra.forms import BilinearForm
from triptych.core.algebra.rewritten import Cut
from triptych.core.algebra.weights import SIDES, Link


def test_a_map_in_half_precision_rounds_as_a_product_in_half_precision_does() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 1, 7, 300, generator=generator).half()
    link = Link((torch.randn(4, 300, 24, generator=generator) * 0.1).half())
    exact = x.double() @ link.weight.double()
    found, plain = link(x), x @ link.weight
    assert found.dtype == torch.float16
    own_error, plain_error = ((y.double() - exact).norm() for y in (found, plain))
    # The nearest numbers that float16 has, or nearly: no product sums in float16.
    nearest = (exact.half().double() - exact).norm()
    assert nearest <= own_error <= 1.05 * nearest
    assert own_error <= 1.05 * plain_error
    torch.testing.assert_close(found, plain, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["factored", "stacked", "shared", "symmetric", "latent", "collaborative"])
def test_multiplied_out_there_is_one_link_a_side_and_what_was_shared_stays_so(name: str) -> None:
    weights = make_layer(name, biased=True).weights("self")
    plain = weights.with_single_links()
    for side in SIDES:
        chain, own = plain.chain(side), weights.chain(side)
        assert len(chain) == 1
        product = own[0].weight
        for link in own[1:]:
            product = product @ (torch.diag_embed(link.weight) if link.diagonal else link.weight)
        torch.testing.assert_close(chain[0].weight, product.expand_as(chain[0].weight))
        for other in SIDES:
            assert (plain.chain(other) is chain) == (weights.chain(other) is own)


def test_shares_of_what_was_lost_are_none_where_there_is_nothing_nor_below() -> None:
    lost, whole = torch.tensor([[1.0, 0.0], [-1e-9, 3.0]]), torch.tensor([[4.0, 0.0], [2.0, 3.0]])
    assert Cut.shares(lost, whole) == (0.25, 0.0, 0.0, 1.0)


def test_the_rank_of_a_form_is_told_by_the_longer_side() -> None:
    # Rounding of a product grows with its longer side: 2000 ε here, which 3 ε would not cover.
    left, right = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(2000, 2, dtype=torch.float64)
    left[0, 0] = left[1, 1] = right[0, 0] = 1.0
    for small, rank in ((100, 1), (10_000, 2)):
        right[1, 1] = small * torch.finfo(torch.float64).eps
        assert int(BilinearForm(left, right).rank()) == rank
