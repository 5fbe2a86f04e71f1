"""The conditional generator of FedBM (2025): from the embedding of a class concept to an image."""

from itertools import pairwise

from torch import Tensor, nn

UPSAMPLINGS = 4
SLOPE = 0.2  # of the leaky ReLU


class ConditionalGenerator(nn.Module):
    """Codes (B, code_size) -> images (B, channels, image_size, image_size) with values from 0 to 1.

    A linear layer gives maps of a sixteenth of the image's size, which convolutions refine and double four
    times. A size that is no multiple of 16 is cut from the middle of the next one that is.
    """

    def __init__(self, code_size: int, image_size: int, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        self.image_size = image_size
        self.start = -(-image_size // 2**UPSAMPLINGS)
        self.expand = nn.Linear(code_size, 2 * width * self.start**2)
        widths = [2 * width, 2 * width, 2 * width, 2 * width, width, width]
        layers: list[nn.Module] = []
        for level, (inputs, outputs) in enumerate(pairwise(widths)):
            layers += [
                nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.LeakyReLU(SLOPE),
            ]
            if level < UPSAMPLINGS:
                layers.append(nn.Upsample(scale_factor=2))
        layers += [nn.Conv2d(width, channels, kernel_size=3, padding=1), nn.Sigmoid()]
        self.blocks = nn.Sequential(*layers)

    def forward(self, codes: Tensor) -> Tensor:
        """Images (B, channels, image_size, image_size) of codes (B, code_size)."""
        maps = self.expand(codes).unflatten(1, (-1, self.start, self.start))
        images = self.blocks(maps)
        margin = (images.shape[-1] - self.image_size) // 2
        return images[..., margin : margin + self.image_size, margin : margin + self.image_size]
