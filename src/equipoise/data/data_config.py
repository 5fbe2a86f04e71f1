"""What a federation's data depends on: typed, checked, and independent of methods and engines."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from equipoise.core.table import LATER, Table
from equipoise.data.layouts import Layout

#: how volumes are cut
Plane = Literal["sagittal", "coronal", "axial"]
MOST_SITES = 10_000
MOST_IMAGES = 1_000_000  # of a phantom


class PhantomConfig(Table):
    """The built-in data: procedural lesion images, made from a seed."""

    sites: int = Field(default=4, ge=1, le=MOST_SITES, description="number of sites")
    classes: int = Field(default=5, ge=2, le=8, description="number of classes")
    images: int = Field(default=2000, ge=2, le=MOST_IMAGES, description="number of images over all sites and parts")
    size: int = Field(default=32, ge=16, le=512, description="pixels per side")
    imbalance: float = Field(default=20.0, ge=1, description="most frequent class : rarest class")
    missing: float = Field(default=0.2, ge=0, lt=1, description="share of the classes that each site lacks")
    skew: float = Field(default=0.5, ge=0, le=100, description="how unevenly classes spread over sites; 0: evenly")
    shift: float = Field(default=1.0, ge=0, le=100, description="strength of each site's colour and scanner shift")
    difficulty: float = Field(default=1.0, ge=0, le=100, description="how much images of one class vary")
    common: bool = Field(default=False, description="one common validation and test set for all sites")
    patients: Literal["own", "any"] = Field(
        default="own",
        description="own: validation and test images are of a site's own classes; any: of all classes",
        json_schema_extra=LATER,
    )
    cohort: int = Field(default=0, ge=0, le=MOST_IMAGES, description="images of an unseen cohort from another scanner")
    masks: bool = Field(
        default=False,
        description="images have masks of skin, lesion and ulcer instead of a class: for segmentation",
        json_schema_extra=LATER,
    )
    seed: int = Field(default=0, ge=0, description="random seed of the images; the run's seed does not change them")


class ColumnNames(Table):
    """The titles of a manifest's columns, where they differ from these."""

    path: str = Field(default="path", description="image files")
    label: str = Field(default="label", description="classes")
    site: str = Field(default="site", description="hospitals")
    split: str = Field(default="split", description="parts: train, valid, test")
    group: str = Field(default="group", description="lesions or patients, whose images belong in one part")
    mask: str = Field(default="mask", description="masks of images, for segmentation", json_schema_extra=LATER)


class DataConfig(Table):
    """Which images a run sees, how they are split into parts and shared out to sites."""

    name: str = Field(default="phantom", description="a source, folder:DIR (one folder per class) or manifest:FILE")
    root: Path | None = Field(default=None, description="raw files to prepare from when no prepared store exists")
    store: Path | None = Field(default=None, description="where prepared stores live; default $EQUIPOISE_DATA")
    size: int | None = Field(default=None, ge=8, le=1024, description="pixels per side; default the source's")
    crop: Literal["centre", "squash"] = Field(default="centre", description="how an image becomes square")
    window: tuple[float, float] | None = Field(
        default=None,
        description="centre and width of the grey levels of DICOM and NIfTI; default each file's own",
        json_schema_extra=LATER,
    )
    brightness: bool = Field(
        default=False, description="one mean grey level for all images, applied by prepare", json_schema_extra=LATER
    )
    colour_constancy: bool = Field(default=False, description="shades of grey, power 6, applied by prepare")
    skip_unreadable: bool = Field(default=False, description="go on without missing and unreadable images")
    classes: tuple[str, ...] | None = Field(default=None, description="class order of a folder or manifest")
    layout: Layout | None = Field(
        default=None, description="levels of folder:DIR; default read off the names", json_schema_extra=LATER
    )
    columns: ColumnNames = Field(default=ColumnNames(), json_schema_extra=LATER)
    masks: bool | None = Field(
        default=None,
        description="read masks instead of classes; default: where folders are called images and masks, or a manifest "
        "has a column of masks",
        json_schema_extra=LATER,
    )
    plane: Plane = Field(default="axial", description="how NIfTI volumes are cut into slices", json_schema_extra=LATER)
    header: tuple[str, ...] = Field(
        default=(),
        description="entries of DICOM headers to keep for sub-groups, such as PatientAge; no others are kept",
        json_schema_extra=LATER,
    )

    split: Literal["authors", "grouped", "sites"] = Field(
        default="authors", description="grouped: no lesion in two parts; sites: whole sites train, validate or test"
    )
    split_seed: int = Field(default=0, ge=0, description="random seed of drawn splits")
    folds: int | None = Field(
        default=None,
        ge=2,
        le=100,
        description="cross-validation: folds of groups (lesions, patients), in place of a split",
        json_schema_extra=LATER,
    )
    fold: int = Field(default=0, ge=0, description="the fold that tests, counted from 0", json_schema_extra=LATER)
    leave_out: str | None = Field(
        default=None,
        description="site without training: all its images test the models as an unseen cohort",
        json_schema_extra=LATER,
    )
    kept_apart: Literal["own", "any"] | None = Field(
        default=None,
        description="the only test images are a fixed fifth of all lesions. own: each site tests on its part; any: "
        "each site tests on all of them",
        json_schema_extra=LATER,
    )

    partition: Literal["source", "dirichlet_equal", "dirichlet_per_class", "concentration"] | None = Field(
        default=None, description="division of training images among sites; default: the source's"
    )
    sites: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SITES,
        description="number of sites of a drawn partition, default 10; or with split sites, drawn from the source's",
    )
    alpha: float = Field(default=0.5, gt=0, description="Dirichlet concentration; small: sites differ much")
    alphas: tuple[float, ...] | None = Field(default=None, description="concentration of each class")
    removal: float = Field(default=0.3, ge=0, lt=1, description="chance that a site loses a class (concentration)")
    partition_seed: int | None = Field(default=None, ge=0, lt=2**32, description="default: the run's seed")
    min_images: int = Field(default=1, ge=1, description="fewest training images a site may have")
    redraw: bool = Field(default=False, description="repeat the draw until no site is too small")
    training_sites: tuple[str, ...] | None = Field(
        default=None, description="sites that train; the others only validate and test"
    )

    imbalance: float | None = Field(default=None, ge=1, description="subsample training images to this long tail")
    images: int | None = Field(
        default=None,
        ge=1,
        description="number of images to keep, drawn with data.split_seed; each site and class keeps its share",
        json_schema_extra=LATER,
    )
    limit: int | None = Field(default=None, ge=1, description="largest number of images per site and part")
    phantom: PhantomConfig = PhantomConfig()

    @model_validator(mode="after")
    def _fold_is_there(self) -> "DataConfig":
        if self.fold >= (self.folds or 1):
            few = f"there are folds 0 to {self.folds - 1}" if self.folds else "data.folds says how many there are"
            raise ValueError(f"fold = {self.fold}, but {few}")
        return self

    @model_validator(mode="after")
    def _one_way_to_test(self) -> "DataConfig":
        taken = [f"folds = {self.folds}"] if self.folds else []
        taken += ['split = "sites"'] if self.split == "sites" else []
        if self.kept_apart and taken:
            raise ValueError(f"kept_apart chooses the test images, and so does {taken[0]}: drop one")
        return self

    @field_validator("window")
    @classmethod
    def _positive_width(cls, window: tuple[float, float] | None) -> tuple[float, float] | None:
        if window is not None and not window[1] > 0:
            raise ValueError(f"a window is [centre, width], and its width is above 0, not {window[1]:g}")
        return window

    @field_validator("classes")
    @classmethod
    def _different_classes(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        twice = sorted({name for name in names if names.count(name) > 1}) if names else []
        if twice:
            raise ValueError(f"{', '.join(twice)} is named twice")
        return names

    def store_root(self) -> Path:
        """The folder of prepared stores: `store`, else $EQUIPOISE_DATA, else the user's cache folder."""
        if self.store is not None:
            return self.store.expanduser()
        if "EQUIPOISE_DATA" in os.environ:
            return Path(os.environ["EQUIPOISE_DATA"]).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "equipoise"
