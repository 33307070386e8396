"""The embedded digits."""

import numpy as np
import pytest

import millstream as ms


@pytest.mark.parametrize(("split", "size"), [("train", 1438), ("test", 359)])
def test_digits_have_the_shape_of_every_image_dataset(split, size):
    digits = ms.datasets.DigitsDataset(split)
    arrays = digits.as_array_dict()
    assert len(digits) == size
    assert (arrays["image"].shape, arrays["image"].dtype) == ((size, 8, 8, 1), np.uint8)
    assert (arrays["label"].shape, arrays["label"].dtype) == ((size,), np.int32)
    assert (arrays["image"].min(), arrays["image"].max()) == (0, 255)
    assert set(arrays["label"].tolist()) == set(range(10))
    np.testing.assert_array_equal(digits[5]["image"], arrays["image"][5])


def test_digits_look_like_their_labels():
    """The mean zero is hollow and the mean one is not."""
    arrays = ms.datasets.DigitsDataset().as_array_dict()
    middle = arrays["image"][:, 2:6, 3:5].mean(axis=(1, 2, 3))
    assert middle[arrays["label"] == 0].mean() < 40 < 150 < middle[arrays["label"] == 1].mean()


def test_splits_share_no_image():
    train, test = (ms.datasets.DigitsDataset(split).as_array_dict()["image"] for split in ("train", "test"))
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in test}


def test_digits_cannot_be_changed_by_accident():
    with pytest.raises(ValueError, match="read-only"):
        ms.datasets.DigitsDataset().as_array_dict()["image"][0] = 0
