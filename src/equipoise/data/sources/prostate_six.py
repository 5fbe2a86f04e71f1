"""Prostate MRI of the six sites that multi-site studies share (Liu et al., 2020): the five of PRR and I2CVB.

The prepared folders RUNMC, BMC, I2CVB, UCL, BIDMC and HK hold `Case00.nii.gz` and `Case00_segmentation.nii.gz`.
"""

from pathlib import Path

from equipoise.data.data_config import DataConfig
from equipoise.data.sources import Listing
from equipoise.data.sources.prostate import listing_of, prepared_cases

TITLE = "prostate MRI of six sites, the prepared folders of multi-site studies, with masks"
SIZE = 256
PARTITION = "source"
LICENCE = "NCI-ISBI 2013 and I2CVB: CC BY 3.0; PROMISE12: for research, by the challenge's terms"
OBTAIN = "https://liuquande.github.io/SAML: the folders RUNMC, BMC, I2CVB, UCL, BIDMC and HK"

PATIENTS = {"RUNMC": 30, "BMC": 30, "I2CVB": 19, "UCL": 13, "BIDMC": 12, "HK": 12}


def listing(config: DataConfig, root: Path) -> Listing:
    """The slices of the six sites' patients that show the prostate."""
    cases = list(prepared_cases(root, {name: name for name in PATIENTS}))
    return listing_of(config, root, cases, PATIENTS)
