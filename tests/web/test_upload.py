"""The upload of rows, a few pieces at a time."""

import pytest

from loadgen.web.control_messages import WINDOW, LoadPiece, Upload


@pytest.mark.parametrize("n", [1, WINDOW, WINDOW + 1, 20])
def test_every_piece_goes_once_and_few_are_on_their_way(n):
    upload = Upload([LoadPiece("r", 0, k, n, b"") for k in range(n)])
    on_their_way, sent = upload.begin(), []
    while on_their_way:
        assert len(on_their_way) <= WINDOW
        arrived = on_their_way.pop(0)
        sent.append(arrived.k)
        on_their_way += upload.got(arrived.k)
        on_their_way += upload.got(arrived.k)  # confirmed twice
    assert sent == list(range(n))
