"""Images: files opened as sRGB, pixels written into rows of batches, images made of arrays, and Oklab."""

from millstream.integrations._image_coefficients import FRACTIONAL as FRACTIONAL
from millstream.integrations._image_coefficients import IMAGENET as IMAGENET
from millstream.integrations._image_coefficients import Coefficients as Coefficients
from millstream.integrations._image_coefficients import balanced as balanced
from millstream.integrations._image_coefficients import rescale as rescale
from millstream.integrations._image_coefficients import standardized as standardized
from millstream.integrations._image_colors import linear_to_oklab as linear_to_oklab
from millstream.integrations._image_colors import linear_to_srgb as linear_to_srgb
from millstream.integrations._image_colors import oklab_to_linear as oklab_to_linear
from millstream.integrations._image_colors import oklab_to_srgb as oklab_to_srgb
from millstream.integrations._image_colors import srgb_to_linear as srgb_to_linear
from millstream.integrations._image_colors import srgb_to_oklab as srgb_to_oklab
from millstream.integrations._image_pixels import to_pillow as to_pillow
from millstream.integrations._image_pixels import write_chw as write_chw
from millstream.integrations._image_pixels import write_hwc as write_hwc
from millstream.sources.image_file import open_srgb as open_srgb
from millstream.sources.image_file import read_srgb as read_srgb
