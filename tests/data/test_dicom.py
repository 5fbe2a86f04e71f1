"""DICOM: rescaled levels through a window, with the first of several windows and white zeros."""

import sys

import numpy as np
import pytest

from equipoise.core.errors import UserError
from equipoise.data.dicom import header, is_dicom, windowed
from equipoise.data.raw import decode

pydicom = pytest.importorskip("pydicom", reason="needs equipoise[medical]")
LEVELS = np.array([[0, 40, 80, 200], [-1000, 20, 60, 3000]] * 2)


@pytest.fixture
def slice_of(made_up, tmp_path):
    """The bytes of a CT slice whose header is changed as given."""

    def write(levels=LEVELS, **changes):
        path = tmp_path / "slice.dcm"
        made_up.slice_file(path, levels, "patient 7")
        file = pydicom.dcmread(path)
        for keyword, value in changes.items():
            setattr(file, keyword, value)
        file.save_as(path)
        return path.read_bytes()

    return write


def test_the_files_own_window_spans_black_to_white(slice_of):
    assert windowed(slice_of()).tolist()[:2] == [[0, 128, 255, 255], [0, 64, 191, 255]]


def test_a_given_window_comes_before_the_files_own(slice_of):
    assert windowed(slice_of(), (100, 200)).tolist()[0] == [0, 51, 102, 255]


def test_the_first_of_several_windows_counts(slice_of):
    content = slice_of(WindowCenter=[100, 40], WindowWidth=[200, 80])
    assert windowed(content).tolist()[0] == [0, 51, 102, 255]


def test_without_a_window_the_darkest_and_brightest_pixels_are_the_ends(slice_of):
    content = slice_of(WindowCenter=None, WindowWidth=None)
    assert (windowed(content).min(), windowed(content).max()) == (0, 255)
    assert windowed(content)[0, 0] == round(1000 / 4000 * 255)


def test_monochrome1_is_turned_round(slice_of):
    plain, turned = windowed(slice_of()), windowed(slice_of(PhotometricInterpretation="MONOCHROME1"))
    assert (np.abs(plain.astype(int) + turned - 255) <= 1).all()


def test_a_slice_decodes_like_any_image(slice_of):
    content = slice_of(np.full((8, 8), 40))
    assert is_dicom(content) and decode(content, 4).tolist() == np.full((3, 4, 4), 128).tolist()
    assert decode(content, 4, window=(40, 20)).max() == 128
    assert decode(content, 4, window=(0, 80)).max() == 255


def test_a_header_is_read_without_pixels(slice_of, tmp_path):
    content = slice_of()
    assert header(content, "PatientID") == header(tmp_path / "slice.dcm", "PatientID") == "patient 7"
    assert header(content, "PatientSex") == ""


def test_several_frames_are_refused(slice_of):
    with pytest.raises(ValueError, match="several frames"):
        windowed(slice_of(NumberOfFrames=2, Rows=2))


def test_the_package_that_is_missing_is_named(slice_of, monkeypatch):
    content = slice_of()
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UserError, match=r"pydicom: install the extra medical"):
        windowed(content)
