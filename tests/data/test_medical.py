"""DICOM and NIfTI as users bring them: series, frames, volumes, compressed pixels, and what is kept of headers."""

import io
import zipfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from equipoise.core.errors import UserError
from equipoise.data import DataConfig, load_federation, volumes
from equipoise.data.dicom import windowed
from equipoise.data.raw import Frame, decode
from equipoise.data.sources import folder
from equipoise.engine.loop import Run
from equipoise.methods import get_method
from harness import events, tiny_config

pydicom = pytest.importorskip("pydicom", reason="needs equipoise[medical]")
nibabel = pytest.importorskip("nibabel", reason="needs equipoise[medical]")
RANDOM = np.random.default_rng(0)


@pytest.fixture
def series(made_up, tmp_path):
    """Writes a CT series of some slices and one patient, whose disease shows as a bright square."""

    def write(name, patient, slices=4, bright=False, size=16, **changes):
        for number in range(slices):
            levels = RANDOM.integers(0, 60, (size, size))
            levels[4:12, 4:12] += 60 * bright
            path = tmp_path / "mine" / name / f"{number}.dcm"
            made_up.slice_file(path, levels, patient)
            file = pydicom.dcmread(path)
            for keyword, value in changes.items():
                setattr(file, keyword, value)
            file.save_as(path)
        return tmp_path / "mine"

    return write


def volume(path, shape=(6, 7, 5), bright=False, affine=None):
    """Writes a volume, which ends in the sagittal, coronal and axial direction after so many voxels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    voxels = RANDOM.normal(100, 10, shape).astype(np.float32)
    voxels[2:4, 2:5] += 80 * bright
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4) if affine is None else affine), path)
    return voxels


def listed(root, **settings):
    return folder.listing(DataConfig(name=f"folder:{root}", **settings), root)


def federation_of(root, tmp_path, **settings):
    return load_federation(DataConfig(name=f"folder:{root}", store=tmp_path / "stores", size=16, **settings), 0)


def trained(federation, folder):
    """The balanced accuracy on test images after some rounds of FedAvg."""
    config = tiny_config("fedavg", "train.rounds=3", "train.optimiser.lr=0.01")
    Run(config, get_method("fedavg"), federation, folder).execute()
    final = [event for event in events(folder) if event["event"] == "final"]
    return final[-1]["metrics"]["balanced_accuracy"]


def parts_by_group(federation):
    found = {}
    for site in federation.sites:
        for part, split in site.splits.items():
            for row in split.rows:
                found.setdefault(split.store.index.groups[row], set()).add(part)
    return found


# ---- DICOM ----


def test_a_dicom_series_trains_with_its_patients_kept_in_one_part(series, tmp_path):
    for number in range(10):
        series(f"healthy/case-{number}", f"P{number}")
        root = series(f"bleeding/case-{number + 10}", f"P{number + 10}", bright=True)
    federation = federation_of(root, tmp_path)
    assert federation.classes == ("bleeding", "healthy") and federation.warnings == ()
    assert federation.class_counts("train").sum() == 56
    groups = parts_by_group(federation)
    assert len(groups) == 20 and all(len(parts) == 1 for parts in groups.values())
    assert trained(federation, tmp_path / "run") == 1


def test_patients_are_groups_without_their_ids_and_no_other_entry_is_kept(series, tmp_path):
    series("a", "Mustermann^Max", slices=2, PatientAge="061Y", PatientSex="M")
    root = series("b", "", slices=2)
    found = listed(root)
    first, second, third, fourth = (record.group for record in found.records)
    assert first == second and first.startswith("patient ") and third == "b/0.dcm" != fourth
    assert found.columns == () and all(record.extra == () for record in found.records)
    store = federation_of(root, tmp_path).sites[0].splits["train"].store
    text = (store.folder / "index.json").read_text()
    assert "Mustermann" not in text and "061Y" not in text
    asked = listed(root, header=("PatientAge", "Modality"))
    assert asked.columns == ("PatientAge", "Modality")
    assert [record.extra for record in asked.records] == [("061Y", "CT")] * 2 + [("", "CT")] * 2


def test_an_entry_that_dicom_does_not_know_is_refused(series, tmp_path):
    root = series("a", "P1")
    with pytest.raises(UserError, match=r"data\.header names Age; use DICOM's keywords"):
        federation_of(root, tmp_path, header=("Age",))


@pytest.fixture
def slice_of(series):
    """One slice with changed entries, as pydicom holds it."""

    def make(**changes):
        root = series("one", "P", slices=1, **changes)
        return pydicom.dcmread(root / "one" / "0.dcm")

    return make


def content_of(file):
    written = io.BytesIO()
    file.save_as(written)
    return written.getvalue()


@pytest.mark.parametrize("syntax", ["RLELossless", "JPEG2000Lossless"])
def test_compressed_pixels_are_those_of_the_plain_file(slice_of, syntax):
    file = slice_of(size=64)
    plain = windowed(content_of(file))
    file.compress(getattr(pydicom.uid, syntax))
    assert np.array_equal(windowed(content_of(file)), plain)


def test_a_colour_photograph_in_jpeg_is_read_in_colour(slice_of):
    picture = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 40, 90)).save(picture, "JPEG", quality=100)
    file = slice_of(SamplesPerPixel=3, PhotometricInterpretation="YBR_FULL_422", PlanarConfiguration=0)
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 8, 8, 7, 0
    file.file_meta.TransferSyntaxUID = pydicom.uid.JPEGBaseline8Bit
    file.PixelData = pydicom.encaps.encapsulate([picture.getvalue()])
    file["PixelData"].VR = "OB"
    middle = decode(content_of(file), 8)[:, 4, 4].astype(int)
    assert np.abs(middle - (200, 40, 90)).max() < 8


def multi_frame(file, frames):
    """A file with several frames, each 10 levels brighter than the one before."""
    levels = np.stack([np.full((16, 16), 1024 + 10 * number, dtype="<i2") for number in range(frames)])
    file.NumberOfFrames, file.PixelData = frames, levels.tobytes()
    return file


def test_every_frame_of_a_file_is_an_image_of_one_group(slice_of, tmp_path):
    file = multi_frame(slice_of(PatientID=""), 3)
    (tmp_path / "mine" / "two").mkdir()
    file.save_as(tmp_path / "mine" / "two" / "run.dcm")
    records = [record for record in listed(tmp_path / "mine").records if record.name.startswith("two")]
    assert [record.name for record in records] == ["two/run.dcm#1", "two/run.dcm#2", "two/run.dcm#3"]
    assert {record.group for record in records} == {"two/run.dcm"}
    content = content_of(file)
    shown = [decode(content, 4, frame=Frame(number))[0, 0, 0] for number in range(3)]
    assert shown == [0, round(10 / 80 * 255), round(20 / 80 * 255)]


def test_a_frame_may_have_its_own_window_and_slope(slice_of):
    file = multi_frame(slice_of(), 2)
    for keyword in ("WindowCenter", "WindowWidth", "RescaleSlope", "RescaleIntercept"):
        delattr(file, keyword)
    shared, frames = pydicom.Dataset(), [pydicom.Dataset(), pydicom.Dataset()]
    shared.PixelValueTransformationSequence = [pydicom.Dataset()]
    shared.PixelValueTransformationSequence[0].RescaleSlope = 1
    shared.PixelValueTransformationSequence[0].RescaleIntercept = -1024
    for frame, width in zip(frames, (40, 80)):
        frame.FrameVOILUTSequence = [pydicom.Dataset()]
        frame.FrameVOILUTSequence[0].WindowCenter, frame.FrameVOILUTSequence[0].WindowWidth = 0, width
    file.SharedFunctionalGroupsSequence, file.PerFrameFunctionalGroupsSequence = [shared], frames
    content = content_of(file)
    assert windowed(content, frame=0).max() == 128
    assert windowed(content, frame=1).max() == round(50 / 80 * 255)


def test_dicom_files_need_no_ending_and_may_lie_in_zip_files(series, tmp_path):
    root = series("a", "P1", slices=2)
    with zipfile.ZipFile(root / "a" / "more.zip", "w") as archive:
        archive.write(root / "a" / "1.dcm", "deep/9.dcm")
    (root / "a" / "0.dcm").rename(root / "a" / "IM0001")
    (root / "a" / "1.dcm").unlink()
    series("b", "P1", slices=1)
    found = listed(root)
    assert [record.name for record in found.records] == ["a/IM0001", "a/more.zip!deep/9.dcm", "b/0.dcm"]
    assert len({record.group for record in found.records}) == 1


def test_a_report_without_pixels_is_no_image_and_a_broken_file_is_named(series, tmp_path):
    root = series("a", "P1", slices=6)
    series("b", "P2", slices=6)
    report = pydicom.dcmread(root / "a" / "0.dcm")
    for keyword in ("Rows", "Columns", "PixelData"):
        delattr(report, keyword)
    report.save_as(root / "a" / "report.dcm")
    found = listed(root)
    assert len(found.records) == 12 and "skipped: 1 .dcm" in found.facts["warnings"][-1]
    whole = (root / "a" / "1.dcm").read_bytes()
    (root / "a" / "1.dcm").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"1 of 12 images of folder:.* cannot be read: .*a/1\.dcm"):
        federation_of(root, tmp_path)


def test_without_the_package_files_are_skipped_with_the_way_to_read_them(series, monkeypatch, tmp_path):
    root = series("a", "P1", slices=2)
    for name in "ab":
        (root / name).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(root / name / "plain.png")
    monkeypatch.setattr("equipoise.data.medical.PACKAGES", {"pydicom": lambda: False, "nibabel": lambda: False})
    monkeypatch.setattr("equipoise.data.dicom.is_installed", lambda: False)
    found = listed(root)
    (told,) = found.facts["warnings"]
    assert len(found.records) == 2 and "skipped: 2 .dcm; pydicom would read some of them: install the extra" in told


# ---- NIfTI ----


def test_a_nifti_volume_trains_slice_by_slice_and_stays_in_one_part(tmp_path):
    for number in range(10):
        volume(tmp_path / "mine" / "tumour" / f"t{number}.nii.gz", bright=True)
        volume(tmp_path / "mine" / "healthy" / f"h{number}.nii")
    federation = federation_of(tmp_path / "mine", tmp_path)
    assert sum(federation.class_counts(part).sum() for part in ("train", "valid", "test")) == 100
    groups = parts_by_group(federation)
    assert len(groups) == 20 and all(len(parts) == 1 for parts in groups.values())
    assert trained(federation, tmp_path / "run") == 1


@pytest.mark.parametrize(("plane", "count"), [("sagittal", 6), ("coronal", 7), ("axial", 5)])
def test_a_volume_is_cut_in_the_plane_that_is_asked_for(tmp_path, plane, count):
    volume(tmp_path / "mine" / "a" / "1.nii.gz")
    volume(tmp_path / "mine" / "b" / "1.nii.gz")
    found = listed(tmp_path / "mine", plane=plane)
    assert Counter(found.classes[record.label] for record in found.records) == {"a": count, "b": count}
    assert found.records[0].name == "a/1.nii.gz#1" and found.records[0].group == "a/1.nii.gz"


def test_slices_are_the_volumes_with_the_front_on_top_however_it_lies(tmp_path):
    voxels = volume(tmp_path / "plain.nii")
    turned = nibabel.Nifti1Image(voxels[::-1].transpose(2, 1, 0), np.array(
        [[0, 0, -1, 5], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]], dtype=float
    ))  # fmt: skip
    nibabel.save(turned, tmp_path / "turned.nii.gz")
    for file in ("plain.nii", "turned.nii.gz"):
        content = (tmp_path / file).read_bytes()
        assert (
            volumes.is_volume_content(content)
            and volumes.slices(content, "axial") == volumes.slices(tmp_path / file, "axial") == 5
        )
        shown = volumes.shown(content, "axial", 3, (100, 100))
        expected = np.round(np.clip((voxels[:, :, 3] - 50) / 100, 0, 1) * 255)
        assert np.array_equal(shown, expected.T[::-1]), "rows from front to back, columns from left to right"


def test_a_volume_spans_nearly_all_of_its_levels_in_every_slice(tmp_path):
    voxels = np.zeros((20, 20, 10), dtype=np.int16)
    voxels[..., 5:] = 3000
    voxels[0, 0, 0] = 32000  # one voxel of metal
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / "ct.nii")
    content = (tmp_path / "ct.nii").read_bytes()
    assert volumes.shown(content, "axial", 4).max() == 0 and volumes.shown(content, "axial", 5).min() == 255
    assert volumes.shown(content, "axial", 5, (3000, 6000)).max() == 128


def test_masks_beside_volumes_are_no_images(tmp_path):
    for label in "ab":
        volume(tmp_path / "mine" / label / "case.nii.gz")
        volume(tmp_path / "mine" / label / "case_seg.nii.gz")
        volume(tmp_path / "mine" / label / "other_mask.nii.gz")
    found = listed(tmp_path / "mine")
    assert {record.group for record in found.records} == {
        f"{label}/{name}.nii.gz" for label in "ab" for name in ("case", "other_mask")
    }, "a file that is named like a mask, but is nobody's, is a volume"
    assert found.facts["warnings"] == ["files that are not read were skipped: 2 masks of volumes"]


@pytest.mark.parametrize(("shape", "message"), [((4, 4, 4, 2), "4 dimensions"), ((4, 4), "2 dimensions")])
def test_what_is_no_volume_is_named(tmp_path, shape, message):
    volume(tmp_path / "mine" / "a" / "1.nii")
    (tmp_path / "mine" / "b").mkdir()
    nibabel.save(nibabel.Nifti1Image(np.ones(shape, np.float32), np.eye(4)), tmp_path / "mine" / "b" / "2.nii")
    with pytest.raises(UserError, match=rf"image 1 of .*b/2\.nii .*{message}"):
        federation_of(tmp_path / "mine", tmp_path)


def test_a_manifest_lists_series_and_volumes(series, tmp_path):
    series("slices", "P1", slices=2)
    volume(tmp_path / "mine" / "v.nii.gz")
    lines = ["path,label,site,split", "slices/0.dcm,a,x,train", "slices/1.dcm,b,x,test", "v.nii.gz,b,y,train"]
    (tmp_path / "mine" / "list.csv").write_text("\n".join(lines))
    config = DataConfig(name=f"manifest:{tmp_path / 'mine' / 'list.csv'}", store=tmp_path / "stores", size=16)
    federation = load_federation(config, 0)
    assert {site.name: sum(map(len, site.splits.values())) for site in federation.sites} == {"x": 2, "y": 5}
    index = federation.sites[0].splits["train"].store.index
    assert index.groups[0] == index.groups[1] and set(index.groups[2:]) == {"v.nii.gz"}


def test_settings_of_volumes_and_headers_are_refused_elsewhere(tmp_path):
    for settings, message in (({"plane": "coronal"}, "data.plane"), ({"header": ("Modality",)}, "data.header")):
        with pytest.raises(UserError, match=f"{message} has no effect on phantom"):
            load_federation(DataConfig(store=tmp_path, **settings), 0)
