import pytest

from shoal.ops.student import t_quantile


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423), (120, 1.9799)],
)
def test_t_quantile_is_the_tables(freedom, t):
    assert t_quantile(freedom) == pytest.approx(t, abs=5e-5)


def test_t_quantile_of_many_is_the_normal_distributions():
    assert t_quantile(1000) == pytest.approx(1.96234, abs=1e-5)  # the sum
    assert t_quantile(1001) == pytest.approx(t_quantile(1000), abs=1e-5)  # the expansion
    assert t_quantile(10**7) == pytest.approx(1.959964, abs=1e-6)
