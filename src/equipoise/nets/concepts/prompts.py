"""How the classes of a data set are put into words: a concept per class, and sentences that each concept is set into.

FedBM (Zhu et al., 2025) turns these prompts into the distribution of each class's text embeddings. The numbers of
sentences for OCT (28) and Kvasir (24) are the paper's, and so are the concepts of these two; the sentences are our own.
"""

from __future__ import annotations

import string
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.core.errors import UserError

SLOT = "{concept}"
#: the text encoder of banks where none is named
DEFAULT_ENCODER = "minilm"


@dataclass(frozen=True)
class Wording:
    """The descriptions of a data set's classes.

    Args:
        concepts: what each class is, by class name; a class without one is called by its name
        templates: sentences with a {concept} in them
        released: where the authors' released code gives a class the concept of another, by class name
    """

    concepts: Mapping[str, str]
    templates: tuple[str, ...]
    released: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.templates:
            raise UserError("there are no templates: give at least one sentence with {concept} in it")
        for template in self.templates:
            if SLOT not in template:
                raise UserError(f"the template {template!r} has no place for the concept: write {SLOT} into it")

    def prompts(self, classes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The sentences about each class, in the order of the templates."""
        spoken = [self.concepts.get(name) or spell_out(name) for name in classes]
        return tuple(tuple(template.replace(SLOT, concept) for template in self.templates) for concept in spoken)


def spell_out(name: str) -> str:
    """A class name as words: "dyed-lifted_polyps" is "dyed lifted polyps"."""
    return " ".join(name.replace("_", " ").replace("-", " ").split())


def wording_of(dataset: str) -> Wording:
    """The wording of a built-in data set; of any other one, its class names in sentences for medical images."""
    return WORDINGS.get(dataset) or Wording({}, MEDICAL)


def read_wording(path: Path) -> Wording:
    """A user's own wording: a TOML file with `templates = [...]` and, if wanted, a table `[concepts]`."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise UserError(f"cannot read the prompts in {path}: {problem}") from None
    templates, concepts = raw.get("templates"), raw.get("concepts", {})
    texts = isinstance(templates, list) and all(isinstance(text, str) for text in templates)
    named = isinstance(concepts, dict) and all(isinstance(text, str) for text in concepts.values())
    if not texts or not named or raw.keys() - {"templates", "concepts"}:
        raise UserError(f'{path} should hold templates = ["... {SLOT} ...", ...] and a table [concepts] of texts')
    return Wording(concepts, tuple(templates or ()))


MEDICAL = (
    "A medical image of {concept}.",
    "A clinical image that shows {concept}.",
    "This picture was taken of a patient with {concept}.",
    "The finding in this image is {concept}.",
    "An image labelled as {concept} by an expert.",
    "A typical example of {concept}.",
    "A rare presentation of {concept}.",
    "A close view of {concept}.",
    "The image is consistent with {concept}.",
    "Diagnosis: {concept}.",
    "What can be seen here is {concept}.",
    "A diagnostic image acquired because of {concept}.",
    "An early stage of {concept}.",
    "A clear case of {concept}.",
    "A difficult case of {concept}.",
    "The appearance is characteristic of {concept}.",
    "A teaching image about {concept}.",
    "The report of this examination mentions {concept}.",
    "An image from a collection of {concept}.",
    "Visual signs of {concept}.",
)

DERMOSCOPY = (
    "A dermoscopic image of {concept}.",
    "Dermoscopy of the skin shows {concept}.",
    "A magnified view of {concept} on the skin.",
    "A dermatoscope was used to photograph {concept}.",
    "The skin lesion in this image is {concept}.",
    "A close-up of skin with {concept}.",
    "Polarised dermoscopy with {concept} in the centre.",
    "The dermatologist's diagnosis is {concept}.",
    "Histology confirmed {concept}.",
    "The pigment pattern suggests {concept}.",
    "The colours and the border are those of {concept}.",
    "A pigmented spot, diagnosed as {concept}.",
    "An example of {concept} from a dermatology clinic.",
    "The structures seen under the dermatoscope indicate {concept}.",
    "A patient's skin lesion: {concept}.",
    "An image of {concept} with some hairs across it.",
    "A small {concept} on fair skin.",
    "A large {concept} that fills much of the image.",
    "Skin cancer screening found {concept}.",
    "This mole check ended with the finding {concept}.",
    "A textbook illustration of {concept} in dermoscopy.",
    "An atypical {concept} as the dermatoscope shows it.",
    "Follow-up photograph of {concept}.",
    "The centre of the photograph is taken up by {concept}.",
)

BLOOD_SMEAR = (
    "A microscope image of {concept}.",
    "A peripheral blood smear with {concept}.",
    "The blood cell in the centre is {concept}.",
    "A stained smear in which {concept} can be seen.",
    "A single cell, classified as {concept}.",
    "Light microscopy of blood: {concept}.",
    "The haematologist labelled this cell as {concept}.",
    "A Giemsa-stained image of {concept}.",
    "The shape of the nucleus points to {concept}.",
    "The cytoplasm and its granules are those of {concept}.",
    "An analyser photographed {concept} in a blood sample.",
    "Among red cells lies {concept}.",
    "A typical example of {concept} in normal blood.",
    "An oil-immersion view of {concept}.",
    "The differential count lists this cell as {concept}.",
    "A digital image of {concept} from a laboratory.",
    "A close-up of {concept} on a glass slide.",
    "Cell morphology: {concept}.",
    "The image shows {concept} on a pale background.",
    "The stain brings out {concept}.",
    "A healthy donor's blood with {concept}.",
    "A cropped picture of {concept}.",
    "This cell has the size and colour of {concept}.",
    "An atlas of haematology would call this {concept}.",
)

RETINAL_OCT = (
    "An optical coherence tomography scan of {concept}.",
    "An OCT image with {concept}.",
    "A cross-section of the retina that shows {concept}.",
    "Retinal OCT: {concept}.",
    "A B-scan through the macula with {concept}.",
    "The layers of the retina look as in {concept}.",
    "The OCT of this eye is graded as {concept}.",
    "An ophthalmologist would read this scan as {concept}.",
    "A grey-scale tomogram of {concept}.",
    "The scan of the fovea is consistent with {concept}.",
    "A patient's macular scan: {concept}.",
    "Spectral-domain OCT with the finding {concept}.",
    "The retinal pigment epithelium appears as in {concept}.",
    "A depth scan of the eye with signs of {concept}.",
    "The central retina of an eye with {concept}.",
    "A clear example of {concept} on OCT.",
    "A subtle case of {concept} on OCT.",
    "An advanced case of {concept} on OCT.",
    "The reflectivity of the layers indicates {concept}.",
    "The foveal contour is that of {concept}.",
    "A screening examination of the eye found {concept}.",
    "The eye clinic's report says {concept}.",
    "A tomographic slice of the posterior eye with {concept}.",
    "The boundary between retina and choroid is typical of {concept}.",
    "A noisy OCT slice that still shows {concept}.",
    "An image of {concept} for the teaching of ophthalmology.",
    "The scan was taken to follow up {concept}.",
    "What the retinal layers reveal here is {concept}.",
)

ENDOSCOPY = (
    "An endoscopic image of {concept}.",
    "Endoscopy of the digestive tract shows {concept}.",
    "A view through the endoscope with {concept}.",
    "A frame from a gastrointestinal endoscopy: {concept}.",
    "The camera in the gut looks at {concept}.",
    "The mucosa in this frame shows {concept}.",
    "The endoscopist noted {concept}.",
    "A colour photograph of {concept} from inside the body.",
    "A colonoscopy or gastroscopy frame with {concept}.",
    "In the lumen one sees {concept}.",
    "The finding of this examination is {concept}.",
    "A close view of {concept} under white light.",
    "A distant view of {concept} under white light.",
    "The frame is an example of {concept}.",
    "The examination reached {concept}.",
    "An image of {concept} with glare on wet tissue.",
    "The folds and the colour of the tissue are those of {concept}.",
    "A gastroenterologist labelled this image as {concept}.",
    "A partly blurred frame of {concept}.",
    "A sharp frame of {concept}.",
    "The vessels of the mucosa look as in {concept}.",
    "A picture of {concept} for an atlas of endoscopy.",
    "The report of the endoscopy describes {concept}.",
    "The scope was held still in front of {concept}.",
)

HEAD_CT = (
    "A CT slice of a head with {concept}.",
    "A non-contrast head CT that shows {concept}.",
    "Computed tomography of the brain: {concept}.",
    "An axial slice of the skull with {concept}.",
    "A brain window in which {concept} is bright.",
    "The bright blood on this slice is {concept}.",
    "The radiologist reports {concept}.",
    "An emergency scan found {concept}.",
    "The finding on this head CT is {concept}.",
    "A patient after a fall, whose scan shows {concept}.",
    "A patient with sudden headache, whose scan shows {concept}.",
    "The neuroradiologist labelled this slice as {concept}.",
    "A small amount of {concept}.",
    "A large {concept} that presses on the brain.",
    "The place and shape of the blood are those of {concept}.",
    "Acute {concept} on computed tomography.",
    "A grey-scale slice with signs of {concept}.",
    "The hyperdense area is {concept}.",
    "A textbook example of {concept} on CT.",
    "A subtle case of {concept} on CT.",
    "The scan was repeated to follow up {concept}.",
    "One slice of a head scan, with {concept}.",
    "The stroke team was called because of {concept}.",
    "A slice chosen to teach what {concept} looks like.",
)

HANDWRITING = (
    "A handwritten {concept}.",
    "A scanned form with {concept} written by hand.",
    "Somebody wrote {concept} with a pen.",
    "A black and white picture of {concept}.",
    "The character in this image is {concept}.",
)

_SKIN_LESIONS = {
    "akiec": "actinic keratosis or intraepithelial carcinoma",
    "bcc": "basal cell carcinoma",
    "bkl": "benign keratosis-like lesion",
    "df": "dermatofibroma",
    "mel": "melanoma",
    "nv": "melanocytic nevus",
    "vasc": "vascular lesion of the skin",
}
_ISIC_LESIONS = {
    "MEL": _SKIN_LESIONS["mel"],
    "NV": _SKIN_LESIONS["nv"],
    "BCC": _SKIN_LESIONS["bcc"],
    "AK": "actinic keratosis",
    "BKL": _SKIN_LESIONS["bkl"],
    "DF": _SKIN_LESIONS["df"],
    "VASC": _SKIN_LESIONS["vasc"],
    "SCC": "squamous cell carcinoma",
}
_BLOOD_CELLS = {
    "basophil": "basophil with dark granules",
    "eosinophil": "eosinophil with orange granules",
    "erythroblast": "erythroblast, a red cell that still has its nucleus",
    "ig": "immature granulocyte",
    "lymphocyte": "lymphocyte with a round nucleus",
    "monocyte": "monocyte with a folded nucleus",
    "neutrophil": "neutrophil with a segmented nucleus",
    "platelet": "small platelet without a nucleus",
}
# The words of the paper and its released code, of retinas and of endoscopy.
_RETINAL_DISEASES = {
    "AMD": "age-related macular degeneration",
    "CNV": "choroidal neovascularization",
    "CSR": "central serous retinopathy",
    "DME": "diabetic macular edema",
    "DR": "diabetic retinopathy",
    "DRUSEN": "choroidal drusen",
    "MH": "macular hole",
    "NORMAL": "normal retina",
}
_GUT_FINDINGS = {
    "dyed-lifted-polyps": "dyed lifted polyp",
    "dyed-resection-margins": "dyed resection margin",
    "esophagitis": "esophagitis",
    "normal-cecum": "cecum",
    "normal-pylorus": "pylorus",
    "normal-z-line": "Z-line",
    "polyps": "polyps",
    "ulcerative-colitis": "ulcerative colitis",
}
_HAEMORRHAGES = {
    "epidural": "epidural haemorrhage, a lens of blood between skull and dura",
    "intraparenchymal": "intraparenchymal haemorrhage, blood within the brain tissue",
    "intraventricular": "intraventricular haemorrhage, blood in the ventricles",
    "subarachnoid": "subarachnoid haemorrhage, blood in the sulci and cisterns",
    "subdural": "subdural haemorrhage, a crescent of blood along the skull",
}
_CHARACTERS = {
    **{digit: f"digit {digit}" for digit in string.digits},
    **{letter: f"capital letter {letter}" for letter in string.ascii_uppercase},
    **{letter: f"small letter {letter}" for letter in string.ascii_lowercase},
}
# What the phantom draws for each class, the most frequent first.
_PHANTOM_LESIONS = {
    "nevus": "brown nevus with an even border and a regular pigment network",
    "keratosis": "greyish brown keratosis with a sharp border and dark globules",
    "melanoma": "dark melanoma of many colours with a ragged border and a blue veil",
    "carcinoma": "pink carcinoma with a blurred border and grey blue patches",
    "fibroma": "light brown fibroma with a pale centre and a soft border",
    "angioma": "red angioma full of dark red lacunae",
    "lentigo": "broad light brown lentigo with a dense network and a ragged border",
    "actinic": "faint pink actinic keratosis without a clear border",
}

WORDINGS: dict[str, Wording] = {
    "phantom": Wording(_PHANTOM_LESIONS, DERMOSCOPY),
    "ham10000": Wording(_SKIN_LESIONS, DERMOSCOPY),
    "dermoscopy-prr": Wording({name: _SKIN_LESIONS[name] for name in ("nv", "bkl", "mel")}, DERMOSCOPY),
    "fed-isic2019": Wording(_ISIC_LESIONS, DERMOSCOPY),
    "isic2019": Wording(_ISIC_LESIONS, DERMOSCOPY),
    "rsna-ich": Wording(_HAEMORRHAGES, HEAD_CT),
    "femnist": Wording(_CHARACTERS, HANDWRITING),
    "pbc": Wording(_BLOOD_CELLS, BLOOD_SMEAR),
    "oct": Wording(_RETINAL_DISEASES, RETINAL_OCT, released={"DR": "MH", "MH": "DR"}),
    "kvasir": Wording(_GUT_FINDINGS, ENDOSCOPY),
}
