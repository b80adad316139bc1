"""Maps as they are applied."""

import torch

from triptych.algebra.weights import Link


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
