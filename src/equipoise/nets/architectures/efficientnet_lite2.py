"""EfficientNet-Lite2: 1280 features, with ImageNet weights of images of 260 pixels."""

from equipoise.nets.architectures._efficientnet_lite import lite

NET = lite(2, size=260)
