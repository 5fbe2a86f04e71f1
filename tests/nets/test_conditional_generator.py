"""FedBM's conditional generator against the released one, and its sizes."""

import pytest
import torch

from equipoise.nets.conditional_generator import ConditionalGenerator


def test_reproduces_the_released_generator(golden):
    arrays = golden("fedbm/generator_forward")
    generator = ConditionalGenerator(code_size=6, image_size=32, width=2)
    weights = {
        name.removeprefix("sd.").replace("l1.0", "expand").replace("conv_blocks", "blocks"): value
        for name, value in arrays.items()
        if name.startswith("sd.")
    }
    missing, unexpected = generator.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.endswith(("running_mean", "running_var", "num_batches_tracked")) for name in missing)
    images = generator.train()(arrays["codes"])
    torch.testing.assert_close(images, arrays["images"], rtol=2e-5, atol=1e-6)


def test_has_the_published_number_of_parameters():
    generator = ConditionalGenerator(code_size=512, image_size=128)
    assert sum(parameter.numel() for parameter in generator.parameters()) == 4_758_211


@pytest.mark.parametrize("size", [28, 64, 100, 128, 224])
def test_makes_images_of_any_size_between_0_and_1(size):
    images = ConditionalGenerator(code_size=5, image_size=size, channels=1, width=2)(torch.randn(2, 5))
    assert images.shape == (2, 1, size, size)
    assert images.min() > 0
    assert images.max() < 1


def test_sizes_between_multiples_of_sixteen_are_the_middle_of_the_next():
    torch.manual_seed(0)
    larger = ConditionalGenerator(code_size=4, image_size=32, width=2).eval()
    smaller = ConditionalGenerator(code_size=4, image_size=28, width=2).eval()
    smaller.load_state_dict(larger.state_dict())
    codes = torch.randn(2, 4)
    assert torch.equal(smaller(codes), larger(codes)[..., 2:30, 2:30])
