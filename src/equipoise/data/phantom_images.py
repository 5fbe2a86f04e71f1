"""Draws phantom dermoscopy images in batches: skin, a lesion that looks like its class, hair, and a scanner.

Classes look alike and differ in colour, border, texture and size. With little data, models confuse neighbours, such as
nevus and melanoma.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.random import Generator

CHUNK = 256  # images drawn at once; part of the random stream, so changing it changes the images

# One line per class, most frequent first: colours (red, green, blue) of the core and of the rim, then radius,
# elongation, border irregularity, pigment network, globules, variegation, blue veil, pale centre, softness.
_LOOKS: dict[str, tuple[float, ...]] = {
    "nevus": (0.42, 0.27, 0.19, 0.62, 0.44, 0.33, 0.44, 1.08, 0.05, 0.75, 0.15, 0.15, 0.00, 0.00, 0.050),
    "keratosis": (0.49, 0.37, 0.27, 0.58, 0.45, 0.33, 0.50, 1.18, 0.08, 0.15, 0.80, 0.30, 0.00, 0.10, 0.022),
    "melanoma": (0.34, 0.22, 0.18, 0.54, 0.37, 0.29, 0.53, 1.20, 0.17, 0.60, 0.30, 0.75, 0.35, 0.05, 0.042),
    "carcinoma": (0.70, 0.47, 0.43, 0.75, 0.53, 0.46, 0.47, 1.12, 0.10, 0.05, 0.30, 0.40, 0.20, 0.20, 0.070),
    "fibroma": (0.60, 0.43, 0.35, 0.60, 0.42, 0.32, 0.42, 1.06, 0.06, 0.55, 0.10, 0.15, 0.00, 0.55, 0.085),
    "angioma": (0.55, 0.18, 0.22, 0.66, 0.30, 0.30, 0.40, 1.08, 0.06, 0.00, 0.70, 0.35, 0.25, 0.00, 0.030),
    "lentigo": (0.52, 0.37, 0.26, 0.60, 0.44, 0.32, 0.52, 1.22, 0.13, 0.70, 0.10, 0.25, 0.00, 0.05, 0.030),
    "actinic": (0.74, 0.51, 0.43, 0.78, 0.56, 0.48, 0.52, 1.16, 0.12, 0.20, 0.45, 0.40, 0.00, 0.10, 0.110),
}
CLASS_NAMES = tuple(_LOOKS)
# How far one image of a class strays from its line: its colours get lighter or darker together (a factor) and each
# a little on its own, the other columns each on its own.
_LIGHTNESS, _HUE = 0.15, 0.018
_SPREAD = np.array([0.07, 0.10, 0.035, 0.25, 0.25, 0.22, 0.15, 0.15, 0.015], np.float32)
_SKIN = np.array([[0.93, 0.76, 0.68], [0.87, 0.68, 0.58], [0.95, 0.80, 0.73], [0.82, 0.62, 0.50]], np.float32)
_VEIL = np.array([0.42, 0.45, 0.56], np.float32)
_PALE = np.array([0.90, 0.78, 0.72], np.float32)
_DARK = np.array([0.17, 0.11, 0.10], np.float32)
_HAIRS = 4
#: what the masks show, from the background up; ulcers are small, and most lesions have none
STRUCTURES = ("skin", "lesion", "ulcer")
_ULCER = np.array([0.45, 0.05, 0.06], np.float32)


@dataclass(frozen=True)
class Scanners:
    """How each site's images look: one entry per site in every array.

    Args:
        gain: colour cast (S, 3)
        gamma: contrast (S,)
        blur: standard deviation (S,) in hundredths of the image's width
        noise: standard deviation (S,) of the sensor's noise
        vignette: darkening (S,) of the corners
        hair: share (S,) of images with hairs
    """

    gain: np.ndarray
    gamma: np.ndarray
    blur: np.ndarray
    noise: np.ndarray
    vignette: np.ndarray
    hair: np.ndarray

    @classmethod
    def draw(cls, count: int, shift: float, rng: Generator) -> "Scanners":
        """Scanners of `count` sites; with `shift` 0 all are the same."""

        def normal(*shape: int) -> np.ndarray:
            return shift * rng.standard_normal((count, *shape), dtype=np.float32)

        warmth = 0.09 * normal(1) * np.array([1, 0, -1], np.float32)
        return cls(
            gain=np.exp(warmth + 0.05 * normal(1) + 0.03 * normal(3)),
            gamma=np.exp(0.20 * normal()),
            blur=0.7 + 1.0 * np.abs(normal()),
            noise=0.012 + 0.012 * np.abs(normal()),
            vignette=np.clip(0.25 + 0.2 * normal(), 0, 0.8),
            hair=np.clip(0.25 + 0.15 * normal(), 0, 1),
        )

    def joined(self, other: "Scanners") -> "Scanners":
        """These scanners followed by the other ones."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return Scanners(**{name: np.concatenate(pair) for name, pair in pairs.items()})


def render(
    labels: np.ndarray, sites: np.ndarray, scanners: Scanners, size: int, difficulty: float, seed: int
) -> np.ndarray:
    """Images of classes `labels` (n,) seen by the scanners of `sites` (n,): uint8 (n, 3, size, size)."""
    images = np.empty((len(labels), 3, size, size), dtype=np.uint8)
    for start in range(0, len(labels), CHUNK):
        rng = np.random.default_rng([seed, 3, start])
        chunk = slice(start, start + CHUNK)
        scene, _ = _scene(labels[chunk], scanners.hair[sites[chunk]], size, difficulty, rng)
        images[chunk] = _scan(scene, sites[chunk], scanners, rng)
    return images


def render_with_masks(
    labels: np.ndarray,
    sites: np.ndarray,
    scanners: Scanners,
    ulcerated: np.ndarray,
    size: int,
    difficulty: float,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """As `render`, with an ulcer in some lesions; and masks, uint8 (n, size, size), of `STRUCTURES`.

    Args:
        ulcerated: share (S,) of each site's lesions that have an ulcer
    """
    images = np.empty((len(labels), 3, size, size), dtype=np.uint8)
    masks = np.empty((len(labels), size, size), dtype=np.uint8)
    for start in range(0, len(labels), CHUNK):
        rng, of_ulcers = np.random.default_rng([seed, 3, start]), np.random.default_rng([seed, 4, start])
        chunk = slice(start, start + CHUNK)
        scene, lesion = _scene(labels[chunk], scanners.hair[sites[chunk]], size, difficulty, rng)
        ulcer = _ulcers(lesion, of_ulcers.random(len(lesion)) < ulcerated[sites[chunk]], of_ulcers)
        images[chunk] = _scan(_toward(scene, _ULCER, np.float32(0.9) * ulcer), sites[chunk], scanners, rng)
        masks[chunk] = np.where(ulcer, 2, lesion > 0.5)
    return images, masks


def _ulcers(lesion: np.ndarray, there: np.ndarray, rng: Generator) -> np.ndarray:
    """One round spot somewhere on each lesion (b, size, size) of the images that have an ulcer: bool, alike."""
    count, size = len(lesion), lesion.shape[-1]
    place = (rng.random(lesion.shape) * (lesion > 0.5)).reshape(count, -1).argmax(axis=1)
    down, right = _grid(size)
    centre = [np.linspace(-1, 1, size, dtype=np.float32)[axis][:, None, None] for axis in np.divmod(place, size)]
    spot = np.hypot(down - centre[0], right - centre[1]) < _uniform(0.10, 0.18, count, rng)
    return spot & (lesion > 0.5) & there[:, None, None]


def _scene(
    labels: np.ndarray, hair: np.ndarray, size: int, difficulty: float, rng: Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Skin with one lesion each, before any scanner: float32 (b, 3, size, size) in 0..1; and the lesions' masks."""
    count = len(labels)
    looks = _draw_looks(labels, difficulty, rng)
    skin = _skin(count, size, rng)
    mask, depth, across, along = _outline(looks, size, rng)
    colour = _lesion(looks, depth, across, along, rng)
    opacity = (mask * _uniform(0.78, 0.98, count, rng))[:, None]
    scene = skin * (1 - opacity) + colour * opacity
    return _toward(scene, _DARK, _hair(rng.random(count) < hair, size, rng)), mask


def _draw_looks(labels: np.ndarray, difficulty: float, rng: Generator) -> np.ndarray:
    """The line of each image's class (b, 15), strayed from at random."""
    looks = np.array(list(_LOOKS.values()), dtype=np.float32)[labels]
    lightness = np.exp(_LIGHTNESS * difficulty * rng.standard_normal((len(labels), 1), dtype=np.float32))
    hue = _HUE * difficulty * rng.standard_normal((len(labels), 3), dtype=np.float32)
    colours = looks[:, :6] * lightness + np.tile(hue, 2)
    others = looks[:, 6:] + difficulty * _SPREAD * rng.standard_normal((len(labels), 9), dtype=np.float32)
    return np.hstack([np.clip(colours, 0.05, 0.95), others])


def _skin(count: int, size: int, rng: Generator) -> np.ndarray:
    """Skin of varying tone with blotches and pores (b, 3, size, size)."""
    tone = rng.dirichlet(np.full(len(_SKIN), 0.7), count).astype(np.float32) @ _SKIN
    blotches = 0.03 * _noise(count, size, 4, rng) + 0.02 * _noise(count, size, 14, rng)
    redness = np.array([0.01, -0.02, -0.02], np.float32)[:, None, None] * _noise(count, size, 5, rng)[:, None]
    return tone[:, :, None, None] * (1 + blotches[:, None]) + redness


def _outline(looks: np.ndarray, size: int, rng: Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Soft mask and depth (0 at the border, 1 in the middle) of each lesion, and its own coordinates.

    All four are (b, size, size).
    """
    count = len(looks)
    radius = np.clip(looks[:, 6], 0.22, 0.68)[:, None, None]
    stretch = np.sqrt(np.clip(looks[:, 7], 1, 1.6))[:, None, None]
    irregularity = np.clip(looks[:, 8], 0.01, None)[:, None, None]
    down, right = _grid(size)
    down, right = down - _normal(0.08, count, rng), right - _normal(0.08, count, rng)
    across, along = _turned(down, right, _uniform(0, np.pi, count, rng))
    distance = np.hypot(across * stretch, along / stretch)
    direction = np.arctan2(along, across)
    border = np.ones_like(distance)
    for wave in range(1, 9):  # low waves make a lesion lopsided, high ones make its border ragged
        phase = _uniform(0, 2 * np.pi, count, rng)
        border += irregularity * _normal(1.3 / wave**0.8, count, rng) * np.cos(wave * direction + phase)
    border = radius * np.clip(border, 0.5, 1.5)
    softness = np.clip(looks[:, 14], 0.012, None)[:, None, None]
    return _step(distance - border, 0, -1 / softness), np.clip(1 - distance / border, 0, 1), across, along


def _lesion(looks: np.ndarray, depth: np.ndarray, across: np.ndarray, along: np.ndarray, rng: Generator) -> np.ndarray:
    """Colours of each lesion over the whole image (b, 3, size, size)."""
    count, size = len(looks), depth.shape[-1]
    core, rim = looks[:, 0:3, None, None], looks[:, 3:6, None, None]
    network, globules, variegation, veil, pale = np.clip(looks[:, 9:14], 0, 1.2).T[:, :, None, None]
    blend = np.clip(1.6 * depth + 0.25 * _noise(count, size, 5, rng), 0, 1)[:, None]
    colour = rim * (1 - blend) + core * blend
    patches = variegation * _step(_noise(count, size, 4, rng), 0.6)
    colour = colour * (1 - 0.5 * patches[:, None])
    warp, pitch = 0.06 * _noise(count, size, 6, rng), _uniform(20, 25, count, rng)
    mesh = np.maximum(np.cos(pitch * (across + warp)), np.cos(pitch * (along - warp)))
    colour = colour * (1 - 0.32 * (network * np.clip(mesh, 0, 1) ** 3)[:, None])
    colour = _toward(colour, _DARK, 0.45 * globules * _step(_noise(count, size, 11, rng), 0.5))
    colour = _toward(colour, _VEIL, 0.8 * veil * _step(_noise(count, size, 3, rng), 0.4))
    centre = depth + 0.12 * _noise(count, size, 6, rng)
    return _toward(colour, _PALE, 0.75 * pale * _step(centre, 0.55, 9))


def _hair(hairy: np.ndarray, size: int, rng: Generator) -> np.ndarray:
    """Opacity (b, size, size) of a few bent hairs on the images where `hairy` (b,) is true."""
    count = len(hairy)
    strands = np.zeros((count, size, size), dtype=np.float32)
    width = max(0.014, 0.6 / size)
    for _ in range(_HAIRS):
        there = (hairy & (rng.random(count) < 0.5))[:, None, None]
        along, across = _turned(*_grid(size), _uniform(0, np.pi, count, rng))
        gap = across - _uniform(-0.9, 0.9, count, rng) - _normal(0.15, count, rng) * along**2
        strands = np.maximum(strands, there * np.float32(0.6) * np.exp(-((gap / width) ** 2)))
    return strands


def _scan(scene: np.ndarray, sites: np.ndarray, scanners: Scanners, rng: Generator) -> np.ndarray:
    """What each site's scanner makes of a scene: uint8 (b, 3, size, size)."""
    count, size = len(sites), scene.shape[-1]
    present, place = np.unique(sites, return_inverse=True)
    kernels = np.stack([_blur_matrix(size, scanners.blur[site]) for site in present])[place][:, None]
    image = kernels @ scene @ kernels.transpose(0, 1, 3, 2)
    down, right = _grid(size)
    image *= 1 - scanners.vignette[sites][:, None, None, None] * ((down**2 + right**2) / 2)[:, None] ** 1.5
    exponent = scanners.gamma[sites][:, None, None, None] * np.exp(_normal(0.06, count, rng))[:, None]
    image = np.clip(image * scanners.gain[sites][:, :, None, None], 0, 1) ** exponent
    image += scanners.noise[sites][:, None, None, None] * rng.standard_normal(image.shape, dtype=np.float32)
    return np.round(255 * np.clip(image, 0, 1)).astype(np.uint8)


def _noise(count: int, size: int, cells: int, rng: Generator) -> np.ndarray:
    """Smooth random fields (b, size, size) with unit variance and about `cells` bumps across."""
    position = np.linspace(0, cells - 1, size)[:, None] - np.arange(-1, cells + 1)
    weights = np.exp(-((position / 0.75) ** 2))
    weights = (weights / np.sqrt((weights**2).sum(axis=1, keepdims=True))).astype(np.float32)
    grid = rng.standard_normal((count, cells + 2, cells + 2), dtype=np.float32)
    return weights @ grid @ weights.T


def _blur_matrix(size: int, deviation: float) -> np.ndarray:
    """Rows that average neighbours with a Gaussian of `deviation` hundredths of the width (size, size)."""
    distance = np.arange(size)[:, None] - np.arange(size)
    weights = np.exp(-0.5 * (distance / max(deviation * size / 100, 0.05)) ** 2)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates from -1 to 1 downwards (1, size, 1) and to the right (1, 1, size)."""
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    return axis[None, :, None], axis[None, None, :]


def _turned(down: np.ndarray, right: np.ndarray, angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The coordinates across and along a frame turned by `angle` (b, 1, 1)."""
    return right * np.cos(angle) + down * np.sin(angle), down * np.cos(angle) - right * np.sin(angle)


def _uniform(low: float, high: float, count: int, rng: Generator) -> np.ndarray:
    return rng.uniform(low, high, (count, 1, 1)).astype(np.float32)


def _normal(deviation: float, count: int, rng: Generator) -> np.ndarray:
    return np.float32(deviation) * rng.standard_normal((count, 1, 1), dtype=np.float32)


def _step(field: np.ndarray, threshold: float, steepness: float | np.ndarray = 6.0) -> np.ndarray:
    """A soft step from 0 to 1 where a field exceeds its threshold."""
    return 1 / (1 + np.exp(np.clip(-steepness * (field - threshold), -30, 30)))


def _toward(colour: np.ndarray, target: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Mix (b, 3, size, size) with one colour (3,) by `amount` (b, size, size)."""
    return colour + amount[:, None] * (target[:, None, None] - colour)
