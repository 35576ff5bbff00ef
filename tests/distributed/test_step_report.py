"""What a report carries arrives as it was."""

import pytest
import torch

from evenstep.distributed.step_report import named, unnamed

ROWS = torch.tensor([[3, 1, 3]])
VALUES = torch.tensor([[1.0, 0.1], [2.0, 0.2], [4.0, 0.4]])


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_sparse_gradient_arrives_with_its_rows_as_they_were(is_summed):
    """A whole batch's gradient keeps repeated rows, which an optimizer adds one by one."""
    sent = torch.sparse_coo_tensor(ROWS, VALUES, (5, 2), check_invariants=True)
    sent = sent.coalesce() if is_summed else sent
    got = unnamed(named("gradient/0", [(7, sent)]), "gradient/0/7", torch.device("cpu"))
    assert got.is_coalesced() == is_summed
    assert got._indices().equal(sent._indices())
    assert got._values().equal(sent._values())
    assert got.shape == sent.shape
