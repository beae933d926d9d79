"""The texts that findings share."""

import pytest

from gpuvirt.model.reasons import count_of


@pytest.mark.parametrize(("number", "text"), [(0, "0 GPUs"), (1, "1 GPU"), (8, "8 GPUs")])
def test_a_number_of_gpus_is_a_phrase(number: int, text: str) -> None:
    assert count_of(number, "GPU") == text
